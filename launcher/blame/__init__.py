"""Measuring how much each document and token of a recorded step contributed to its loss and its gradient."""

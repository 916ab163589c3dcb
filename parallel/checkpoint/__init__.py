"""Checkpoints of logical tensors, written and read in pieces."""

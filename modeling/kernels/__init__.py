"""Kernels: for each, a reference and a fast version with one signature."""

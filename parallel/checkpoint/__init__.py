"""Checkpoints of logical tensors, written and read in pieces, so that any layout of ranks can load them."""

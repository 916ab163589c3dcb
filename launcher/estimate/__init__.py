"""A training step traced over fake CUDA tensors, without a GPU: its operations, memory and estimated time."""

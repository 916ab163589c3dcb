"""Weights, gradients and optimizer state under DeepSpeed's ZeRO; the one room that knows DeepSpeed."""

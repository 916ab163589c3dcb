"""Weights, gradients and optimizer state under DeepSpeed's ZeRO; the only package that uses DeepSpeed."""

"""Parallelism: which rank holds which part of weights, activations and state, and which ranks communicate."""

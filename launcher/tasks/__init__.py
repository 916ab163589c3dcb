"""Evaluates a model on tasks of lm-evaluation-harness: loads them, answers their requests, computes their metrics."""

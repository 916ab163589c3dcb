"""Tasks of lm-evaluation-harness: which requests they make, what a model answers, what that comes to."""

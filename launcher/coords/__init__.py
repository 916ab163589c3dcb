"""The coordinate check: whether what a model computes keeps its size as the model gets wider."""

"""Records the operations of a step by part of the model, with each one's cost and the least time it can take."""

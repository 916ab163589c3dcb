"""A training step as it runs here, its time by part of the model."""

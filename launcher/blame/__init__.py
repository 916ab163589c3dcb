"""Which documents and tokens of a recorded step made its loss and its gradient."""

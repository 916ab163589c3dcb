"""A run: its directory, its start, its loop, a step, its state and health."""

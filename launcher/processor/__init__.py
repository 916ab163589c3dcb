"""A training step by local processes on this machine's processor: what it asks for, and how long that takes."""

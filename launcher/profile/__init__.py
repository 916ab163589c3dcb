"""Profile of a training step on this machine: its time by part of the model, and its memory."""

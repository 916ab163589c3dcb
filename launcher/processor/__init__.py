"""Planning of a training step by local processes on this machine's CPU: the work in it, and the seconds it takes."""

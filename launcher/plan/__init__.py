"""What a run will take, computed before it starts."""

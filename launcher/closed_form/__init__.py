"""A step's time and memory from dims alone: closed forms, whose few constants are fitted to published measurements."""

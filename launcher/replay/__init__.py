"""A step of a run executed again, in a scratch run, and looked at."""

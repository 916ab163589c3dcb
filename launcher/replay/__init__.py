"""Executes a recorded step of a run again, in a scratch run, compares it with the record and reports on it."""

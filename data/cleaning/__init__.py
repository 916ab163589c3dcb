"""Cleaning: stages between reading a corpus and tokenizing it, each optional, each with its counts."""

"""Processes: how they start, find each other, stay alive together, stop and end."""

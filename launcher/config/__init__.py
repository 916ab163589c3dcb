"""The config tree: its shape, its loading and its rules."""

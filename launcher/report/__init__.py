"""Builds one self-contained HTML page about one or several runs: config, curves, events, speed and environment."""

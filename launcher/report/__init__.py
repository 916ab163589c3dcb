"""One self-contained HTML page about one run or several: what was trained, how it went, and on what."""

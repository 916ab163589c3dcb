"""Who holds it, and who talks to whom."""

"""What guards a run: detection of hangs, slow ranks, second starts and ranks that disagree, and restarts."""

"""What watches a run from beside it: hangs, stragglers, second starts, restarts, ranks that disagree."""

"""What a run shows while it runs: metrics.jsonl, the terminal, Weights & Biases, plots."""

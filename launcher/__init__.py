"""What happens in a run, and the command line: configs, data preparation, training, planning, proofs and reports."""

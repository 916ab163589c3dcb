"""Jobs on a Slurm cluster: checking, submitting, following and cancelling them."""

"""Jobs on a Slurm cluster: submitting them, following them, and what they need to know of the cluster."""

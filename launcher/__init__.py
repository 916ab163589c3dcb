"""What happens in this run."""

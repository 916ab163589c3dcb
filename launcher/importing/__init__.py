"""Import of a Hugging Face transformers model folder, which is not trusted, into a run directory."""

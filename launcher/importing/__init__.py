"""From a model folder of Hugging Face transformers, which may come from anyone, to a run directory."""

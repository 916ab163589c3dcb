"""Model families, each in one file: its names in the files of Hugging Face transformers, its limits, its sizes."""

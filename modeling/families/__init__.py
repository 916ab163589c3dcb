"""Model families, one file each: names in the files of Hugging Face transformers, limits, and published sizes."""

"""How each family's weights and configuration are called in Hugging Face transformers, without importing it."""

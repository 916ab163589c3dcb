"""The HTML page about prepared data: documents read, kept and dropped, and the tokenizer's efficiency."""

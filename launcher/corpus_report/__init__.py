"""The page of prepared data: what came in, what was kept, and what the tokenizer makes of it."""

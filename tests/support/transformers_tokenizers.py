"""The families whose tokenizer version 5 of transformers takes for its own, whatever tokenizer.json says."""

REPLACED = {"qwen2": "Qwen2Tokenizer", "qwen3_5_moe_text": "Qwen3_5Tokenizer"}

"""The families whose tokenizer transformers 5 replaces by a class of its own, ignoring tokenizer.json."""

REPLACED = {"qwen2": "Qwen2Tokenizer", "qwen3_5_moe_text": "Qwen3_5Tokenizer"}

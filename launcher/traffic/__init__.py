"""The bytes that one training step sends, in closed form."""

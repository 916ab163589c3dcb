"""Context parallelism: the positions of a sequence divided over ranks, and attention cores that communicate."""

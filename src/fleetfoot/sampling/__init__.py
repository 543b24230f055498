"""Sampling: the parameters of a request, and the next token from logits."""

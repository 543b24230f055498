"""Kernels that sampling is made of. Logits are changed in this order: masks, biases, bans, penalties."""

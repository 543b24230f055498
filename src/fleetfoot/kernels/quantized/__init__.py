"""Linear layers with quantized weights."""

WRITTEN_OUTPUTS = 4096
"""Outputs of a weight that are written in the dtype of the activations at a time, for products of the library."""

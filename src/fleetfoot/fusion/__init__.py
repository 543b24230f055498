"""Fusion: a pass over a loaded model that replaces runs of plain decoder layers by fused ones."""

"""Mixers with a state of fixed size per request: short convolutions, gated delta nets, Mamba-2.

`batch.py` says where a step reads and writes states; each other file is an operation, its reference in torch first.
"""

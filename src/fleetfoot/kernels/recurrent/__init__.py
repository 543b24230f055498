"""Mixers with a state of fixed size per request: short convolutions, gated delta nets, Mamba-2.

`batch.py` says where a step reads and writes states; each other file is an operation, its reference in torch first.
"""

CHUNK = 64
"""Tokens of a prompt that are computed at once."""
MAX_STEPS = 32
"""Tokens of a request up to which they are computed one after the other, which alone can keep several states. So how a
request is computed depends on its own tokens, never on the rest of the batch."""

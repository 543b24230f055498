"""Linear layers with quantized weights."""

WRITTEN_OUTPUTS = 4096
"""Outputs of a weight that are written in the dtype of the activations at a time, for products of the library."""

BLOCK_GROUP = 32
"""Inputs that share a scale in what GGUF's blocks become on a GPU."""
_Q4_0, _Q4_1, _Q4_K, _MXFP4 = 2, 3, 12, 39
_FLOATS = 0, 1, 30


def block_form(number: int) -> tuple[str, bool]:
    """What a type of GGUF's blocks, by its number, becomes on a GPU, and whether its groups have zero points: ``int4``,
    ``e2m1``, ``int8`` or ``float``. Outputs of one form are one matrix."""
    if number in (_Q4_0, _Q4_1, _Q4_K):
        return "int4", number != _Q4_0
    return "e2m1" if number == _MXFP4 else "float" if number in _FLOATS else "int8", False

"""The linear methods of a model, from the formats of its weights. No torch."""

from __future__ import annotations

from fleetfoot.config.quantization import QuantizedWeights, WeightFormat
from fleetfoot.quantization.base import LinearMethod, LinearMethods
from fleetfoot.quantization.gguf import block_method
from fleetfoot.quantization.packed import Packed
from fleetfoot.quantization.scaled import Scaled
from fleetfoot.quantization.unquantized import UNQUANTIZED

_METHODS: dict[str, type[Scaled] | type[Packed]] = {"fp8": Scaled, "int8": Scaled, "int4": Packed, "mxfp4": Packed}


def linear_methods(
    weights: QuantizedWeights, *, has_tied_head: bool = False, reads_blocks: bool = True
) -> LinearMethods:
    """The method of each layer. ``has_tied_head``: the head is the embedding, which is never quantized but in GGUF
    files. ``reads_blocks``: products read their blocks; else these are dequantized while they are loaded."""
    if not weights.method or (weights.method == "gguf" and not reads_blocks):
        return UNQUANTIZED
    if weights.method == "gguf":
        rules = tuple((name, block_method(form)) for name, form in weights.rules if form is not None)
        return LinearMethods(UNQUANTIZED.default, rules)
    head = (("lm_head", UNQUANTIZED.default),) * has_tied_head
    named = ((name.replace("block_sparse_moe", "mlp"), _method(form)) for name, form in weights.rules)
    return LinearMethods(UNQUANTIZED.default, (*head, *named))


def _method(form: WeightFormat | None) -> LinearMethod:
    return UNQUANTIZED.default if form is None else _METHODS[form.values](form)

"""The linear methods of a model, from the formats of its weights. No torch."""

from __future__ import annotations

from typing import Literal

from fleetfoot.config.quantization import QuantizedWeights, WeightFormat
from fleetfoot.quantization.base import LinearMethod, LinearMethods
from fleetfoot.quantization.gguf import Blocks, Matrices, block_method
from fleetfoot.quantization.packed import Packed, ScaledInWords
from fleetfoot.quantization.scaled import Scaled
from fleetfoot.quantization.unquantized import UNQUANTIZED

_METHODS: dict[str, type[Scaled] | type[Packed]] = {"fp8": Scaled, "int8": Scaled, "int4": Packed, "mxfp4": Packed}


def linear_methods(
    weights: QuantizedWeights, *, has_tied_head: bool = False, blocks: Literal["read", "matrices", ""] = "read"
) -> LinearMethods:
    """The method of each layer. ``has_tied_head``: the head is the embedding, which is never quantized but in GGUF
    files that are read in place. ``blocks`` of GGUF files: products read them, they become matrices of a GPU's kernels,
    or they are dequantized while they are loaded."""
    if not weights.method or (weights.method == "gguf" and not blocks):
        return UNQUANTIZED
    head = (("lm_head", UNQUANTIZED.default),) * has_tied_head
    if weights.method == "gguf":
        kind = Blocks if blocks == "read" else Matrices
        methods = [(name, block_method(form, kind)) for name, form in weights.rules if form is not None]
        if blocks == "read":
            return LinearMethods(UNQUANTIZED.default, tuple(methods))
        of_experts = (("*.experts*", UNQUANTIZED.default), ("model.embed_tokens", UNQUANTIZED.default))
        return LinearMethods(UNQUANTIZED.default, (*head, *of_experts, *methods))
    named = ((name.replace("block_sparse_moe", "mlp"), _method(form)) for name, form in weights.rules)
    return LinearMethods(UNQUANTIZED.default, (*head, *named))


def _method(form: WeightFormat | None) -> LinearMethod:
    if form is None:
        return UNQUANTIZED.default
    is_packed = form.values == "int8" and form.tensors not in ("plain", "float")
    return ScaledInWords(form) if is_packed else _METHODS[form.values](form)

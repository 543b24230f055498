"""The linear methods of a model, from the formats of its weights. No torch."""

from __future__ import annotations

from fleetfoot.config.quantization import QuantizedWeights, WeightFormat
from fleetfoot.quantization.base import LinearMethod, LinearMethods
from fleetfoot.quantization.packed import Packed
from fleetfoot.quantization.scaled import Scaled
from fleetfoot.quantization.unquantized import UNQUANTIZED

_METHODS: dict[str, type[Scaled] | type[Packed]] = {"fp8": Scaled, "int8": Scaled, "int4": Packed, "mxfp4": Packed}


def linear_methods(weights: QuantizedWeights, *, has_tied_head: bool = False) -> LinearMethods:
    """The method of each layer. ``has_tied_head``: the head is the embedding, which is never quantized."""
    if not weights.method:
        return UNQUANTIZED
    head = (("lm_head", UNQUANTIZED.default),) * has_tied_head
    return LinearMethods(UNQUANTIZED.default, (*head, *((name, _method(form)) for name, form in weights.rules)))


def _method(form: WeightFormat | None) -> LinearMethod:
    return UNQUANTIZED.default if form is None else _METHODS[form.values](form)

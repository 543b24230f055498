"""What decoder layers are made of, and what they offer to `fleetfoot.fusion`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from fleetfoot.layers.norm import RMSNorm
from fleetfoot.records.forward_context import ForwardContext


class Offering(nn.Module):
    """A module that can offer its parts, which fusion computes in place of `forward`. A subclass that computes
    something else, with a method of ``computes`` of its own, offers nothing unless it has an `offer` of its own too."""

    computes: ClassVar[tuple[str, ...]] = ("forward",)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "offer" not in vars(cls) and any(name in vars(cls) for name in cls.computes):
            cls.offer = Offering.offer  # type: ignore[method-assign]

    def offer(self) -> Any:
        """Its parts, as its class documents; None: it has none, and `forward` is called."""
        return None


class Branch(NamedTuple):
    """A mixer or an MLP with its norms: ``x + scale * output_norm(body(input_norm(x), ctx))``."""

    body: Callable[[torch.Tensor, ForwardContext], torch.Tensor]
    """``x [num_tokens, hidden_size]`` -> the same shape, complete on every rank."""
    input_norm: RMSNorm | None = None
    output_norm: RMSNorm | None = None
    scale: float = 1.0

    def __call__(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        output = self.body(x if self.input_norm is None else self.input_norm(x), ctx)
        if self.output_norm is not None:
            output = self.output_norm(output)
        return x + (output if self.scale == 1.0 else self.scale * output)

    def offer(self) -> Any:
        """The parts of the body; None: it offers none."""
        return self.body.offer() if isinstance(self.body, Offering) else None

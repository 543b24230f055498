"""The operations as their callers see them: `Kernels` has one attribute for each.

`fleetfoot.kernels.registry` lists the implementations and loads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from fleetfoot.config.model import RouterSpec
    from fleetfoot.kernels.attention import AttentionBackend
    from fleetfoot.kernels.experts.experts import (
        ExpertPlacement,
        ExpertSizes,
        RouterLinear,
        Routing,
        SharedExpert,
        Stacks,
        TorchExperts,
    )
    from fleetfoot.kernels.linear.linear import PreparedLinear
    from fleetfoot.kernels.linear.roles import ChainLinear
    from fleetfoot.kernels.prepare.tables import GroupTables, RowTables, StateTables, StepBuffers
    from fleetfoot.kernels.quantized.blocks import BlockLinear
    from fleetfoot.kernels.quantized.chain import ChainQuantized
    from fleetfoot.kernels.quantized.packed import PackedMatrix
    from fleetfoot.kernels.quantized.scaled import ScaledMatrix
    from fleetfoot.kernels.recurrent.conv import CausalConv
    from fleetfoot.kernels.recurrent.gated_norm import GatedNorm
    from fleetfoot.kernels.recurrent.recurrence import Recurrence, RecurrenceInputs
    from fleetfoot.kernels.sampling.logits_processors import ListedTokens, LogitsProcessorTables
    from fleetfoot.kernels.sampling.sample import RandomRows
    from fleetfoot.kernels.sampling.token_logprobs import LogprobRows
    from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext, RotaryInputs, StateBatch


_CAPTURABLE_ATTENTION = frozenset({"triton", "hopper"})


@dataclass(frozen=True, slots=True)
class LayerChainPlan:
    """Steps of decoder layers in two kernels each."""

    max_rows: int = 0
    """Most requests of a decode; 0: none."""
    max_contexts: tuple[tuple[int, int], ...] = ()
    """Rows, and the longest context of a step of so many; a step between two of them has the next more rows."""
    reason: str = ""
    """Why there are none; empty: they are switched off, or not for this device."""


NO_LAYER_CHAIN = LayerChainPlan()


@dataclass(frozen=True)
class KernelPlan(Mapping[str, str]):
    """Operation -> the name of its implementation. Immutable and picklable."""

    choices: tuple[tuple[str, str], ...]

    def __getitem__(self, operation: str) -> str:
        return dict(self.choices)[operation]

    def __iter__(self) -> Iterator[str]:
        return (operation for operation, _ in self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def is_capturable(self) -> bool:
        """Whether graphs can hold the attention (`AttentionBackend.is_capturable`)."""
        return self["attention"] in _CAPTURABLE_ATTENTION

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations that occur, those of most operations first."""
        return tuple(name for name, _ in Counter(name for _, name in self.choices).most_common())

    def __str__(self) -> str:
        """Each implementation with its operations: ``triton: attention, rms_norm, ...; torch: ...``."""
        listed = {name: [op for op, choice in self.choices if choice == name] for name in self.names}
        return "; ".join(f"{name}: {', '.join(operations)}" for name, operations in listed.items())


RopeAndCache = Callable[["torch.Tensor", "torch.Tensor", "AttentionMetadata", int, "RotaryInputs"], "torch.Tensor"]
"""See `Kernels.rope_and_cache`: ``(qkv, kv_cache, metadata, num_heads, rotary)``."""


class RMSNorm(Protocol):
    """See `Kernels.rms_norm`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor: ...


class AddRMSNorm(Protocol):
    """See `Kernels.add_rms_norm`."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float = 0.0,
        output_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class PrepareLinear(Protocol):
    """See `Kernels.prepare_linear`."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear: ...


class Route(Protocol):
    """See `Kernels.route`."""

    def __call__(
        self,
        x: torch.Tensor,
        linear: RouterLinear,
        correction: torch.Tensor | None,
        router: RouterSpec,
        num_chosen: int,
        shared: SharedExpert | None = None,
    ) -> Routing: ...


class MakeExperts(Protocol):
    """See `Kernels.experts`."""

    def __call__(
        self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, stacks: Stacks | None = None
    ) -> TorchExperts: ...


class Sample(Protocol):
    """See `Kernels.sample`."""

    def __call__(
        self,
        logits: torch.Tensor,
        random: RandomRows | None = None,
        *,
        invalid: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class ProcessLogits(Protocol):
    """See `Kernels.process_logits`."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        tables: LogitsProcessorTables,
        long_lists: Mapping[int, ListedTokens] = ...,
    ) -> torch.Tensor: ...


class TokenLogprobs(Protocol):
    """See `Kernels.token_logprobs`."""

    def __call__(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num: int, rows: LogprobRows | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A decoder layer as `Kernels.layer_chain` reads it: RMSNorm, attention, RMSNorm, SwiGLU; one rank, no factors."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    eps: float
    """The epsilon of both norms."""
    qkv: Callable[[torch.Tensor], torch.Tensor]
    """`LinearWeight.product`, as of ``o``, ``gate_up`` and ``down``."""
    o: Callable[[torch.Tensor], torch.Tensor]
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]
    num_heads: int
    kv_index: int
    rotary: RotaryInputs
    scale: float
    window: int | None

    @property
    def shape(self) -> tuple[float, ...]:
        """What a kernel for several layers reads once, without the sizes of their weights."""
        hidden_size, head_dim = len(self.input_norm), self.rotary.cos_sin.shape[1]
        return hidden_size, self.num_heads, head_dim, self.eps, self.rotary.eps, self.scale


Recur = Callable[["RecurrenceInputs", "torch.Tensor", "Recurrence", "StateBatch", "GatedNorm | None"], "torch.Tensor"]
"""See `Kernels.recurrence`: ``(inputs, state, parameters, batch, norm)``."""
LayerChain = Callable[["torch.Tensor", "ForwardContext", int], "tuple[torch.Tensor, torch.Tensor] | None"]
"""``(x, ctx, num_layers)``: the input ``[num_tokens, hidden]`` of consecutive layers, which may be written to, the
step, and how many of the layers are computed -> the output of the last one that is still to be added, and the residual
stream to add it to; the same tensor twice: the sum. None: the chain does not compute this step; it has written nothing.
"""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded implementation of each operation."""

    plan: KernelPlan
    """What was loaded: operation -> the name of its implementation."""
    attention: AttentionBackend
    rms_norm: RMSNorm
    """``x [num_tokens, hidden]`` -> the same shape, normalised in float32, times ``weight [hidden] + offset``."""
    add_rms_norm: AddRMSNorm
    """``(x, residual)`` -> ``(rms_norm(total), total)`` with ``total = x + residual``, or ``rms_norm(x) + residual``
    where ``output_weight`` is given, rounded as in separate steps; the first is ``total`` without ``weight``. ``x`` may
    be partial sums ``[splits, num_tokens, hidden]`` float32."""
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    """``[num_tokens, 2 * intermediate]`` (gate, up) -> ``silu(gate) * up [num_tokens, intermediate]``."""
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    """The same with GELU, approximated by tanh."""
    rope_and_cache: RopeAndCache
    """Split ``qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, norm q and k per head where weights are
    given, rotate both at ``metadata.positions``, write K and V to ``kv_cache`` at ``metadata.slot_mapping`` (a negative
    slot writes nothing), and return ``query [num_tokens, num_heads, head_dim]``."""
    prepare_linear: PrepareLinear
    """Arrange ``weight [out, in]`` once for the device; the result maps ``x [n, in]`` -> ``[n, out]``."""
    causal_conv: Callable[[torch.Tensor, torch.Tensor, CausalConv, StateBatch], torch.Tensor]
    """``(x, state, conv, batch)``: a short convolution over the tokens of each request, which keeps the last inputs in
    ``state``; see `fleetfoot.kernels.recurrent.conv.causal_conv_torch`."""
    recurrence: Recur
    """The gated delta rule, or Mamba-2's recurrence, with the state in place; see
    `fleetfoot.kernels.recurrent.recurrence.recurrence_torch`."""
    scaled_linear: Callable[[torch.Tensor, ScaledMatrix], torch.Tensor]
    """``x [n, in]`` -> ``x @ weight.T + bias [n, out]`` with a weight of 8 bits, in e4m3 or int8, and inputs that are
    quantized as the weight says: see `fleetfoot.kernels.quantized.scaled`."""
    packed_linear: Callable[[torch.Tensor, PackedMatrix], torch.Tensor]
    """The same with a weight of 4 bits, and inputs as they are: see `fleetfoot.kernels.quantized.packed`."""
    block_linear: Callable[..., BlockLinear]
    """``(parts, num_inputs, dtype, bias)``: the product with a weight in the blocks of a GGUF file: see
    `fleetfoot.kernels.quantized.blocks`."""
    route: Route
    """The experts of each of ``x [n, hidden]`` by a router: see `fleetfoot.kernels.experts.experts.route_torch`."""
    local_routing: Callable[[Routing, ExpertPlacement, torch.Tensor | None], Routing]
    """The part of a routing that a rank with some of the experts computes, which also counts their load: see
    `fleetfoot.kernels.experts.experts.local_routing_torch`."""
    add_shared: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """The experts' output with that of an expert of every token, times its gate: see
    `fleetfoot.kernels.experts.experts.add_shared_torch`."""
    mul_sigmoid: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The gate of an attention layer's output: see `fleetfoot.kernels.elementwise.mul_sigmoid_torch`."""
    experts: MakeExperts
    """Makes the matrices of a layer's experts, or takes quantized ones; a call multiplies with them: `TorchExperts`, or
    a subclass."""
    quantized_chain: ChainQuantized | None
    """The kernels of a quantized weight in the chain of a fused decoder, ``(weight, role)``; None, also as its result:
    the run calls the operations above."""
    sample: Sample
    """``logits [n, vocab]`` -> ``[n]`` int64: the argmax, or a draw: see `fleetfoot.kernels.sampling.sample`."""
    process_logits: ProcessLogits
    """Logits of any float dtype -> float32 after the logits processors of Model Runner V2: see
    `fleetfoot.kernels.sampling.logits_processors`."""
    mask_tokens: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """``(logits [n, vocab], masks [m, ceil(vocab / 32)], index [n])``: exclude the tokens that are not in the mask of
    their row, in place; see `fleetfoot.kernels.sampling.mask_tokens`."""
    token_logprobs: TokenLogprobs
    """Logprobs of the sampled and of the most probable tokens: see `fleetfoot.kernels.sampling.token_logprobs`."""
    prepare_inputs: Callable[[StepBuffers, RowTables], None]
    """Fill the buffers of a step from the rows' state; see `fleetfoot.kernels.prepare.reference.prepare_inputs_torch`,
    and the functions beside it for the next ones."""
    prepare_decode: Callable[[StepBuffers, RowTables], None]
    """The same for a batch with queries of the same length."""
    prepare_groups: Callable[[StepBuffers, RowTables, GroupTables], None]
    """After one of these, the same for the groups of layers after the first."""
    prepare_states: Callable[[StepBuffers, RowTables, StateTables], None]
    """The same for recurrent states."""
    accept_drafts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RowTables, torch.Tensor], None]
    """``(idx_mapping, sampled, invalid, rows, counts)``: count the tokens that verified drafts yield."""
    post_update: Callable[[torch.Tensor, torch.Tensor, RowTables, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """``(idx_mapping, query_start_loc, rows, sampled, num_sampled, num_rejected)``: advance the rows by a step."""
    propose_ngrams: Callable[[torch.Tensor, torch.Tensor, RowTables, int, int], None]
    """``(idx_mapping, seq_lens, rows, max_ngram, min_ngram)``: drafts by prompt lookup; see
    `fleetfoot.kernels.prepare.ngram`."""
    apply_staged_writes: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
    """``(staged, front, target, num_writes)``: bring a step's staged writes from the host into the device's state."""
    linear_chain: ChainLinear | None
    """``(weight [out, in], bias, role)``: a linear layer in a chain of dependent launches, which reads both in place.
    None: branches call the plain layers."""
    layer_chain: Callable[[Sequence[LayerParts]], LayerChain | None] | None
    """Consecutive fused layers in one call. None, or None as its result: one by one, by the operations above."""

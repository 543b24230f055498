"""The shapes of steps, those that are captured as graphs, and the dispatch of steps to them. No torch: the plan reports
them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from fleetfoot.kernels.runtime.row_buckets import row_bucket
from fleetfoot.records.step import Agreement, SchedulerOutput
from fleetfoot.sampling.shape import PLAIN, TOP_K, VARIANTS, SamplingVariant

MIXED_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
MIXED_FOR_ALL = 512
"""Mixed batches up to this number of tokens are captured for every model, larger ones if launches dominate. Those with
long decodes (`LONGEST_MIXED_DECODE`) are captured up to this number."""
FINE_TOKENS = (
    *(96, 160, 192, 384, 640, 768, 896, 1280, 1536, 1792),
    *(2560, 3072, 3584, 4096, 5120, 6144, 7168),
)
"""Sizes between and beyond `MIXED_TOKENS`: kernels have tiles of 64 and 128 rows."""
FINE_FOR_ALL = 1024
"""As `MIXED_FOR_ALL`, for these sizes."""
LONGEST_MIXED_DECODE = 8192
"""Context of a decode up to which the prefill kernel processes decodes, too, in a captured mixed batch. It has one
program for each KV head, so a longer context would dominate the step."""
FULL_STEP_PADDING = 32
"""A mixed batch fills a step if at most 1 / this of ``max_num_batched_tokens`` is padding."""
_BYTES_PER_LAYER = 96 * 1024
"""Bytes of one layer in a captured graph: a dozen kernels, each with its node and its arguments."""
_BYTES_OF_SAMPLING = 1024 * 1024
"""Bytes of a graph of sampling: at most 50 kernels."""
_LAUNCH_S = 0.0004
"""Seconds to capture one layer, on the host."""
_SAMPLING_S = 0.003
"""Seconds to capture sampling."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What selects a step's graphs and kernels."""

    kind: str
    """``decode``: one token for each request; ``uniform``: 1 + k tokens for each, k drafts; ``mixed``: any lengths;
    ``split``: the same, where attention of decodes is a kernel of its own, which spreads long contexts over the GPU."""
    num_reqs: int
    num_tokens: int
    max_context: int = 0
    """Length that no context exceeds, so that kernels for short ones can be used; 0: there is no such length."""

    @property
    def is_decode(self) -> bool:
        """Whether every request is a decode."""
        return self.kind in ("decode", "uniform")

    @property
    def of_sampling(self) -> StepShape:
        """Equal for shapes with the same rows of logits, which share the graphs of sampling."""
        return self if self.kind == "uniform" else StepShape("decode", self.num_reqs, self.num_reqs)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A graph: ``forward``, the preparation and forward pass of a step; ``sampling``, from its hidden states to the
    drafts; or ``step``, both, so that no kernel waits for another launch: decodes with the most common samplers."""

    part: str
    shape: StepShape
    sampling: SamplingVariant | None = None
    """None: a forward pass."""


@dataclass(slots=True)
class BatchShape:
    """The sizes of a step, which are on the host; lengths and token ids are on the device."""

    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_sampled: int
    max_query_len: int
    padded_reqs: int
    """The number of requests of the graph that runs the step; ``num_reqs`` if it runs eagerly."""
    padded_tokens: int
    num_drafts: int = 0
    """Drafts that each decode verifies, besides the token sampled last."""
    max_context: int = 0
    """Length that no context exceeds; 0: not known."""

    @classmethod
    def of_graph(cls, shape: StepShape) -> BatchShape:
        """The shape of a captured step, in which all requests sample."""
        num_reqs, num_tokens = padded = shape.num_reqs, shape.num_tokens
        if not shape.is_decode:
            return cls(*padded, 0, num_reqs, num_tokens, *padded)
        width = num_tokens // num_reqs
        return cls(*padded, num_reqs, num_reqs, width, *padded, width - 1, shape.max_context)

    @classmethod
    def of_step(cls, output: SchedulerOutput, shape: StepShape | None) -> BatchShape:
        """The shape of a step, padded to that of a graph; None: the step runs eagerly."""
        num_reqs, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        is_decode = output.num_decodes == num_reqs
        return cls(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decodes=output.num_decodes,
            num_sampled=output.num_sampled,
            max_query_len=1 + output.num_drafts if is_decode else max(output.num_scheduled_tokens),
            padded_reqs=num_reqs if shape is None else shape.num_reqs,
            padded_tokens=num_tokens if shape is None else shape.num_tokens,
            num_drafts=output.num_drafts,
            max_context=(output.longest_decode if is_decode else 0) if shape is None else shape.max_context,
        )

    @property
    def is_decode(self) -> bool:
        """Whether every request is a decode, so that all have the same number of tokens."""
        return self.num_decodes == self.num_reqs

    @property
    def num_logits(self) -> int:
        """Number of rows of logits: one for each token of a decode, and one for each prefill that ends."""
        return self.num_sampled + self.num_decodes * self.num_drafts


@dataclass(frozen=True)
class CaptureTable:
    """The shapes that are captured, smallest first in each kind. A kind may be empty.

    ``decode``: requests in a pure decode; ``uniform``: requests in a uniform decode with ``num_drafts`` drafts each;
    ``mixed``: tokens in a small batch that holds prefills, padded to ``max_num_seqs`` requests; ``full_step``: tokens
    in such a batch that fills a step, as chunks of prompts do under load. Other batches run eagerly.

    ``short_contexts``: numbers of requests, ascending, and a context: decodes of up to so many requests have a second
    shape of each size, with faster kernels, if none is longer.
    """

    decode: tuple[int, ...] = ()
    num_drafts: int = 0
    uniform: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    full_step: int | None = None
    max_num_seqs: int = 0
    short_contexts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        *,
        device: str,
        enforce_eager: bool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_drafts: int = 0,
        most_mixed_tokens: int = MIXED_FOR_ALL,
        most_full_tokens: int = 0,
        short_contexts: tuple[tuple[int, int], ...] = (),
    ) -> CaptureTable:
        """The shapes for a configuration: none on a CPU, where there is nothing to replay, and none if eager.
        ``most_mixed_tokens``: size up to which mixed batches are captured; ``most_full_tokens``: size up to which a
        batch with hardly any padding is captured; the others: see `CaptureTable`."""
        if device == "cpu" or enforce_eager:
            return cls()
        sizes = decode_sizes(max_num_seqs)
        uniform = tuple(n for n in sizes if n * (1 + num_drafts) <= max_num_batched_tokens) if num_drafts else ()
        most_mixed = min(max_num_batched_tokens, max(most_mixed_tokens, MIXED_FOR_ALL))
        most_fine = min(max_num_batched_tokens, max(most_full_tokens, FINE_FOR_ALL))
        coarse = {tokens for tokens in MIXED_TOKENS if tokens <= most_mixed}
        fine = {tokens for tokens in (*MIXED_TOKENS, *FINE_TOKENS) if tokens <= most_fine}
        is_full = bool(coarse) and max(coarse) < max_num_batched_tokens <= most_full_tokens
        full_step = max_num_batched_tokens if is_full else None
        mixed = tuple(sorted((coarse | fine) - {full_step}))
        return cls(sizes, num_drafts, uniform, mixed, full_step, max_num_seqs, short_contexts)

    def agree(self, outputs: Sequence[SchedulerOutput], reads_all: bool) -> Agreement:
        """What data-parallel ranks agree on, of which these have requests: a graph if one kind holds all of them.
        ``reads_all``: hidden states of all tokens of a prompt are read."""
        shapes = [self.dispatch(output) for output in outputs]
        kinds = {shape.kind if shape.is_decode else "mixed" for shape in shapes if shape is not None}
        most = max(shape.num_tokens for shape in shapes if shape is not None) if kinds else 0
        has_splits = most in self.split or all(shape is None or shape.kind != "split" for shape in shapes)
        if None in shapes or len(kinds) > 1 or not has_splits or (reads_all and kinds == {"mixed"}):
            # kernels of a bucket's rows are known at the start
            return Agreement(row_bucket(max(output.total_num_scheduled_tokens for output in outputs)))
        return Agreement(most, kinds.pop())

    def agreed(self, agreement: Agreement, longest_decode: int = 0) -> StepShape | None:
        """The shape of a rank's step; None: it runs eagerly."""
        size, kind = agreement
        if not kind or not self.decode:
            return None
        if kind == "mixed":
            is_split = longest_decode > LONGEST_MIXED_DECODE
            return self._mixed_shape("split" if is_split else "mixed", size)
        num_reqs = size // (1 + self.num_drafts) if kind == "uniform" else size
        short = self._short_context(num_reqs)
        return StepShape(kind, num_reqs, size, short if 0 < longest_decode <= short else 0)

    def dispatch(self, output: SchedulerOutput) -> StepShape | None:
        """The smallest shape that holds a step; None: it runs eagerly."""
        if output.agreement.num_tokens:
            return self.agreed(output.agreement, output.longest_decode)
        num_reqs, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        if output.num_decodes == num_reqs:
            if output.num_drafts not in (0, self.num_drafts):
                return None
            kind, sizes = ("uniform", self.uniform) if output.num_drafts else ("decode", self.decode)
            size = _at_least(sizes, num_reqs)
            if size is None:
                return None
            short = self._short_context(size)
            max_context = short if output.longest_decode <= short else 0
            return StepShape(kind, size, size * (1 + output.num_drafts), max_context)
        if output.longest_decode > LONGEST_MIXED_DECODE:
            size = _at_least(self.split, num_tokens)
            return None if size is None else self._mixed_shape("split", size)
        size = _at_least(self.mixed_sizes, num_tokens)
        if size is None or (size == self.full_step and (size - num_tokens) * FULL_STEP_PADDING > size):
            return None
        return self._mixed_shape("mixed", size)

    def captured(
        self, shape: StepShape, sampling: SamplingVariant | None, num_to_propose: int
    ) -> SamplingVariant | None:
        """The variant of sampling that is captured for a step of a shape with ``sampling``; None: a graph ends with
        the forward pass, because a request uses something that no graph has (``sampling`` is None then), because a
        mixed batch verifies or proposes drafts, or because drafting begins or ends with this step."""
        if sampling is None or bool(num_to_propose) != (shape.kind == "uniform"):
            return None
        return None if self.num_drafts and not shape.is_decode else sampling.captured()

    def _mixed_shape(self, kind: str, size: int) -> StepShape:
        return StepShape(kind, min(size, self.max_num_seqs), size)

    def _short_context(self, num_reqs: int) -> int:
        """The longest context, drafts included, of the shape for short ones; 0: there is no such shape."""
        longest = next((context for most, context in self.short_contexts if num_reqs <= most), 0)
        return max(0, longest - self.num_drafts)

    def num_bytes(self, num_layers: int, hidden_bytes: int) -> int:
        """Bytes of the graphs: their nodes, and the hidden states that they return. ``hidden_bytes``: of the hidden
        state of one token."""
        layers = [key for key in self.graphs if key.part != "sampling"]
        samplings = len(self.graphs) - len(layers)
        hidden = sum(key.shape.num_tokens for key in layers) * hidden_bytes
        return len(layers) * num_layers * _BYTES_PER_LAYER + samplings * _BYTES_OF_SAMPLING + hidden

    def seconds(self, num_layers: int) -> float:
        """An estimate of the time that capturing all graphs takes, on the host."""
        num_forwards = sum(key.part != "sampling" for key in self.graphs)
        num_samplings = sum(key.part != "forward" for key in self.graphs)
        return num_forwards * num_layers * _LAUNCH_S + num_samplings * _SAMPLING_S

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest shape; 0: there is none."""
        return max((shape.num_tokens for shape in self.shapes), default=0)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens of the mixed shapes."""
        return self.mixed if self.full_step is None else (*self.mixed, self.full_step)

    @property
    def split(self) -> tuple[int, ...]:
        """Numbers of tokens of the mixed shapes with long decodes."""
        return tuple(size for size in self.mixed if size in MIXED_TOKENS and size <= MIXED_FOR_ALL)

    @cached_property
    def shapes(self) -> tuple[StepShape, ...]:
        """Every shape."""
        return (
            *self._decode_shapes("decode", self.decode, 1),
            *self._decode_shapes("uniform", self.uniform, 1 + self.num_drafts),
            *(self._mixed_shape("mixed", size) for size in self.mixed_sizes),
            *(self._mixed_shape("split", size) for size in self.split),
        )

    @property
    def short(self) -> tuple[int, ...]:
        """Requests of the decodes that have a shape for short contexts, without drafts."""
        return tuple(size for size in self.decode if self._short_context(size))

    def _decode_shapes(self, kind: str, sizes: tuple[int, ...], width: int) -> Iterator[StepShape]:
        """Those for short contexts first, where there are two of a size."""
        for size in sizes:
            shape = StepShape(kind, size, size * width)
            if short := self._short_context(size):
                yield replace(shape, max_context=short)
            yield shape

    @cached_property
    def graphs(self) -> tuple[GraphKey, ...]:
        """All graphs, the largest first, because others fit in its memory."""
        shapes = sorted(self.shapes, key=lambda shape: -shape.num_tokens)
        steps = [shape for shape in shapes if shape.is_decode]
        samplings = dict.fromkeys(
            GraphKey("sampling", shape.of_sampling, variant)
            for shape in shapes
            for variant in VARIANTS
            if not (shape.is_decode and variant in (PLAIN, TOP_K)) and (shape.is_decode or not self.num_drafts)
        )
        return (
            *(GraphKey("forward", shape) for shape in shapes),
            *samplings,
            *(GraphKey("step", shape, variant) for variant in (PLAIN, TOP_K) for shape in steps),
        )


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, then in steps of 16 to 64 and of 32 beyond.

    A padding request costs little (no KV is read, and linear layers compute in tiles of 64 tokens), and a shape costs
    tens of milliseconds when it is captured.
    """
    sizes = (1, 2, 4, 8, 16, 32, 48, *range(64, max_num_seqs, 32))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def _at_least(sizes: tuple[int, ...], size: int) -> int | None:
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


class Capture(Protocol):
    """Captured work that can be queued again."""

    output: Any
    """The return value of the captured work; each replay overwrites its tensors."""

    def replay(self) -> None: ...

"""The batch shapes that are captured as graphs, and the dispatch of steps to them. No torch: the plan reports them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.sampling.shape import MASKS, PLAIN, TOP_K, SamplingVariant
from fleetfoot.utils.progress import report_progress

MIXED_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
MIXED_FOR_ALL = 512
"""Mixed batches up to this number of tokens are captured for every model, larger ones if launches dominate."""
FINE_TOKENS = (
    *(96, 160, 192, 384, 640, 768, 896, 1280, 1536, 1792),
    *(2560, 3072, 3584, 4096, 5120, 6144, 7168),
)
"""Between and beyond `MIXED_TOKENS`: kernels have tiles of 64 and 128 rows. See `CaptureTable.fine`."""
FINE_FOR_ALL = 1024
"""As `MIXED_FOR_ALL`, for fine shapes."""
_CAPTURE_LAUNCHES = 2
"""Launches that take as long as to capture one."""
_EAGER_STEPS = 4
"""Eager steps that cost as much more than the graph of their size as a capture does. 3,008 tokens of Qwen3-0.6B took 40
ms eagerly on a host with an H100, and 10 ms as a graph."""
LONGEST_MIXED_DECODE = 8192
"""Context of a decode up to which the prefill kernel processes decodes, too, in a captured mixed batch. It has one
program for each KV head, so a longer context would dominate the step: see `GraphKey.splits_decodes`."""
FULL_STEP_PADDING = 32
"""A mixed batch fills a step if at most 1 / this of ``max_num_batched_tokens`` is padding."""
_BYTES_PER_LAYER = 96 * 1024
"""Bytes of one layer in a captured graph: a dozen kernels, each with its node and its arguments."""
_FORWARDS, _MIXED_FORWARDS = 3, 2
"""Forward passes of one shape in the memory plan. Decodes: with plain sampling, with top-k, and one that all other
samplers share. Mixed batches: one for all samplers, and one for long contexts, or with hidden states of all tokens.
Fine shapes are counted once."""
_MOST_SAMPLERS = 4
"""Graphs, of which most are sampling alone, for each forward pass in the memory plan."""
_MOST_TRIED = 2
"""Shapes that are tried between two looks for requests."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A captured shape."""

    kind: str
    """``decode``: one token for each request; ``uniform``: 1 + k tokens for each, k drafts; ``mixed``: any lengths."""
    num_reqs: int
    num_tokens: int
    sampling: SamplingVariant | None = PLAIN
    """The sampling of the step. None: the graph ends with the forward pass, because a request uses prompt logprobs,
    more than 256 logprobs, or a list of tokens that exceeds a row of the tables, or because a mixed batch verifies or
    proposes drafts."""
    drafting: int | None = None
    """Number of drafts to propose at the end; 0: a drafter only fills its KV cache; None: no drafting."""
    splits_decodes: bool = False
    """Mixed: attention of decodes is a kernel of its own, which spreads long contexts over the GPU."""
    max_context: int = 0
    """Length that no context exceeds, so that kernels for short ones can be used; 0: there is no such length."""

    @property
    def is_whole(self) -> bool:
        """Whether one graph has all of it, so that no kernel waits for another launch: decodes with the most common
        samplers. Else the forward pass is a graph that others share, and sampling another one: to capture a forward
        pass takes the host tens of milliseconds, sampling few."""
        return self.sampling is None or (self.kind != "mixed" and self.sampling in (PLAIN, TOP_K))

    @property
    def forward(self) -> GraphKey:
        """Equal for shapes that share the graph of a forward pass: those that only differ in their sampling."""
        return self if self.is_whole else replace(self, sampling=MASKS)


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
    def of_graph(cls, key: GraphKey) -> BatchShape:
        """The shape of a captured step, in which all requests sample."""
        num_reqs, num_tokens = key.num_reqs, key.num_tokens
        if key.kind == "mixed":
            return cls(num_reqs, num_tokens, 0, num_reqs, num_tokens, num_reqs, num_tokens)
        width = num_tokens // num_reqs
        padded = num_reqs, num_tokens
        return cls(*padded, num_reqs, num_reqs, width, *padded, width - 1, key.max_context)

    @classmethod
    def of_step(cls, output: SchedulerOutput, key: GraphKey | None) -> BatchShape:
        """The shape of a step, padded to that of a graph; None: the step runs eagerly."""
        num_reqs, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        is_decode = output.num_decodes == num_reqs
        return cls(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decodes=output.num_decodes,
            num_sampled=output.num_sampled,
            max_query_len=1 + output.num_drafts if is_decode else max(output.num_scheduled_tokens),
            padded_reqs=num_reqs if key is None else key.num_reqs,
            padded_tokens=num_tokens if key is None else key.num_tokens,
            num_drafts=output.num_drafts,
            max_context=(output.longest_decode if is_decode else 0) if key is None else key.max_context,
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
    """The shapes, smallest first in each kind. A kind may be empty.

    ``decode``: requests in a pure decode; ``uniform``: requests in a uniform decode with ``num_drafts`` drafts each;
    ``mixed``: tokens in a small batch that holds prefills, padded to ``max_num_seqs`` requests; ``full_step``: tokens
    in such a batch that fills a step, as chunks of prompts do under load. Other batches run eagerly. ``eager_capture``:
    how many of the smallest decode shapes, with drafts if there are any, are captured at every start; others only if
    their kernels are compiled by then, else when they are needed.

    ``short_contexts``: numbers of requests, ascending, and a context: decodes of up to so many requests have a second
    shape of each size, with faster kernels, if none is longer.

    ``fine``: further sizes of mixed batches. Each that the start has not captured is captured once it would have saved
    ``capture_tokens`` tokens of padding, which take as long; until then, steps are padded to one of ``mixed``, or run
    eagerly.
    """

    decode: tuple[int, ...] = ()
    num_drafts: int = 0
    uniform: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    fine: tuple[int, ...] = ()
    capture_tokens: int = 0
    full_step: int | None = None
    max_num_seqs: int = 0
    short_contexts: tuple[tuple[int, int], ...] = ()
    eager_capture: int = 4

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
        mixed = tuple(tokens for tokens in MIXED_TOKENS if tokens <= most_mixed)
        has_full_step = bool(mixed) and mixed[-1] < max_num_batched_tokens <= most_full_tokens
        full_step = max_num_batched_tokens if has_full_step else None
        most_fine = min(max_num_batched_tokens, max(most_full_tokens, FINE_FOR_ALL))
        between = {*MIXED_TOKENS, *FINE_TOKENS} - {*mixed, full_step}
        fine = tuple(sorted(tokens for tokens in between if tokens <= most_fine))
        capture_tokens = _CAPTURE_LAUNCHES * most_mixed_tokens
        return cls(sizes, num_drafts, uniform, mixed, fine, capture_tokens, full_step, max_num_seqs, short_contexts)

    def dispatch(
        self, output: SchedulerOutput, *, sampling: SamplingVariant | None = PLAIN, drafting: int | None = None
    ) -> GraphKey | None:
        """The smallest shape that holds a step; None: it runs eagerly. ``sampling``, ``drafting``: as in `GraphKey`."""
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
            num_tokens = size * (1 + output.num_drafts)
            return GraphKey(kind, size, num_tokens, sampling, drafting, max_context=max_context)
        if drafting is not None or output.num_drafts:
            sampling = None  # a graph of a mixed batch neither verifies nor proposes drafts
        key = self._mixed_key(self._all_mixed, num_tokens, sampling)
        if key is None or output.longest_decode <= LONGEST_MIXED_DECODE:
            return key
        return replace(key, splits_decodes=True)

    def _mixed_key(self, sizes: tuple[int, ...], num_tokens: int, sampling: SamplingVariant | None) -> GraphKey | None:
        size = _at_least(sizes, num_tokens)
        if size is None or (size == self.full_step and (size - num_tokens) * FULL_STEP_PADDING > size):
            return None
        return GraphKey("mixed", min(size, self.max_num_seqs), size, sampling)

    def _short_context(self, num_reqs: int) -> int:
        """The longest context, drafts included, of the shape for short ones; 0: there is no such shape."""
        longest = next((context for most, context in self.short_contexts if num_reqs <= most), 0)
        return max(0, longest - self.num_drafts)

    def is_fine(self, key: GraphKey) -> bool:
        """Whether a shape is captured once it pays: those of ``fine``, and those for long contexts."""
        return key.splits_decodes or (key.kind == "mixed" and key.num_tokens in self.fine)

    def coarse(self, key: GraphKey) -> GraphKey | None:
        """The shape that steps of a fine one are padded to until that is captured; None: they run eagerly."""
        return None if key.splits_decodes else self._mixed_key(self.mixed_sizes, key.num_tokens, key.sampling)

    def num_bytes(self, num_layers: int, hidden_bytes: int) -> int:
        """Bytes of the graphs: the nodes of every shape, and the hidden states that it returns. ``hidden_bytes``: of
        the hidden state of one token."""
        sizes = self._planned_forwards
        return len(sizes) * num_layers * _BYTES_PER_LAYER + sum(sizes) * hidden_bytes

    @property
    def most_graphs(self) -> int:
        """The number of graphs that `num_bytes` counts."""
        return len(self._planned_forwards)

    @cached_property
    def _planned_forwards(self) -> tuple[int, ...]:
        """Tokens of each forward pass in the memory plan."""
        counts = ((key, _MIXED_FORWARDS if key.kind == "mixed" else _FORWARDS) for key in self.keys)
        return (*(key.num_tokens for key, count in counts for _ in range(count)), *self.fine)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest shape; 0: there is none."""
        return max((*(key.num_tokens for key in self.keys), *self.fine), default=0)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens of the mixed shapes, without the fine ones."""
        return self.mixed if self.full_step is None else (*self.mixed, self.full_step)

    @cached_property
    def _all_mixed(self) -> tuple[int, ...]:
        return tuple(sorted((*self.mixed_sizes, *self.fine)))

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every shape but the fine ones, with plain sampling."""
        return (
            *self._decode_keys("decode", self.decode, 1),
            *self._decode_keys("uniform", self.uniform, 1 + self.num_drafts),
            *(GraphKey("mixed", min(size, self.max_num_seqs), size) for size in self.mixed_sizes),
        )

    @property
    def short(self) -> tuple[int, ...]:
        """Requests of the decodes that have a shape for short contexts, without drafts."""
        return tuple(size for size in self.decode if self._short_context(size))

    def _decode_keys(self, kind: str, sizes: tuple[int, ...], width: int) -> Iterator[GraphKey]:
        """Those for short contexts first, where there are two of a size."""
        for size in sizes:
            key = GraphKey(kind, size, size * width)
            if short := self._short_context(size):
                yield replace(key, max_context=short)
            yield key

    @property
    def first_keys(self) -> tuple[GraphKey, ...]:
        """The shapes to capture at every start: the smallest decodes with plain sampling, and with drafts if any; those
        for short contexts besides."""
        first = [key for key in self._plain_keys if not key.max_context][: self.eager_capture]
        return tuple(key for key in self._plain_keys if replace(key, max_context=0) in first)

    @property
    def common_keys(self) -> tuple[GraphKey, ...]:
        """The shapes to capture before requests use them, the most likely first: with plain sampling and with top-k,
        each the largest first, because others fit in its memory; then fine ones, and decodes with token masks."""
        first = *self.with_sampling(PLAIN), *self.with_sampling(TOP_K), *self.fine_with_sampling(PLAIN)
        return (*first, *reversed([key for key in self.with_sampling(MASKS) if key.kind != "mixed"]))

    def with_sampling(self, sampling: SamplingVariant) -> tuple[GraphKey, ...]:
        """The shapes with a variant, the largest first; those that end with the forward pass as they are."""
        shapes = sorted(self._plain_keys, key=lambda key: -key.num_tokens)
        return tuple(key if key.sampling is None else replace(key, sampling=sampling) for key in shapes)

    def fine_with_sampling(self, sampling: SamplingVariant) -> tuple[GraphKey, ...]:
        """The fine shapes with a variant, the largest first; with drafts, they end with the forward pass."""
        used = None if self.num_drafts else sampling
        return tuple(GraphKey("mixed", min(size, self.max_num_seqs), size, used) for size in reversed(self.fine))

    @property
    def _plain_keys(self) -> tuple[GraphKey, ...]:
        """`keys`; with drafts, the steps that verify drafts and propose others, and the forward pass of mixed ones."""
        if not self.num_drafts:
            return self.keys
        uniform = (replace(key, drafting=self.num_drafts) for key in self.keys if key.kind == "uniform")
        return (*uniform, *(replace(key, sampling=None) for key in self.keys if key.kind == "mixed"))


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


class GraphManager:
    """Decides whether a step replays a graph or runs eagerly, captures shapes, and counts.

    A shape is captured when it is first needed, if it was not at the start, or between requests; a fine one when it
    pays. With more graphs than the memory plan counts, the one that was not used for the longest time is dropped.

    ``capture``: captures a shape behind all steps, and adds a forward pass that others share to `forwards`; returns
    None while kernels of it are not compiled; None: the device has no graphs. ``includes_sampling``: False on a rank
    that is not the last of its pipeline, where steps end with the forward pass.
    """

    def __init__(
        self,
        table: CaptureTable,
        capture: Callable[[GraphKey], Capture | None] | None = None,
        *,
        includes_sampling: bool = True,
    ) -> None:
        self.table = table if capture is not None else CaptureTable()
        self.captured: dict[GraphKey, Capture] = {}
        """The captured shapes, the one that was used last at the end."""
        self.forwards: dict[GraphKey, Capture] = {}
        """The forward passes that they share, by `GraphKey.forward`."""
        self.outdated: dict[GraphKey, None] = {}
        """Captured shapes that are captured again: there are better kernels now."""
        self._needed: dict[GraphKey, None] = {}  # by steps that came before their kernels
        self._padding: dict[GraphKey, float] = defaultdict(float)  # tokens that a fine forward pass would have saved
        self._variants: dict[SamplingVariant, None] = {}  # of steps
        self.num_steps: Counter[str] = Counter()
        """Number of steps: ``eager``, or by the kind of their graph."""
        self._includes_sampling = includes_sampling
        self._capture = capture

    def dispatch(
        self, output: SchedulerOutput, *, sampling: SamplingVariant | None, drafting: int | None = None
    ) -> tuple[BatchShape, GraphKey | None]:
        """The shape of a step, padded to that of its graph, and the graph's key; None: the step runs eagerly.
        ``sampling``, ``drafting``: as in `GraphKey`."""
        if not self._includes_sampling:
            sampling = drafting = None
        key = self.table.dispatch(output, sampling=sampling, drafting=drafting)
        if key is not None and key.sampling is not None:
            self._variants[key.sampling] = None
        if key is not None and self.table.is_fine(key) and not (key in self.captured or key.forward in self.forwards):
            key = self._capture_if_it_pays(key)
        self.num_steps["eager" if key is None else key.kind] += 1
        return BatchShape.of_step(output, key), key

    def _capture_if_it_pays(self, key: GraphKey) -> GraphKey | None:
        """A fine shape that has been captured now, or the coarse one that its step is padded to instead."""
        coarse = self.table.coarse(key)
        most, forward = self.table.capture_tokens, key.forward
        self._padding[forward] += most / _EAGER_STEPS if coarse is None else coarse.num_tokens - key.num_tokens
        if self._padding[forward] < most:
            return coarse
        self._needed[key] = None
        if self._try(key) is None and forward not in self.forwards:
            return coarse
        del self._padding[forward]
        return key

    def get(self, key: GraphKey) -> Capture | None:
        """The graph of a shape; None: kernels of it are not compiled."""
        if key in self.outdated:
            self._try(key)
        if key in self.captured:
            self.captured[key] = captured = self.captured.pop(key)
            return captured
        self._needed[key] = None
        return self._try(key)

    def _try(self, key: GraphKey) -> Capture | None:
        assert self._capture is not None  # without it the table is empty
        captured = self._capture(key)
        self.outdated.pop(key, None)
        if captured is not None:
            self.captured[key] = captured
            self._needed.pop(key, None)
            most = self.table.most_graphs
            while len(self.captured) > 1 and (
                len(self._captured_forwards) > most or len(self.captured) > _MOST_SAMPLERS * most
            ):
                self._drop_oldest()
        return captured

    @property
    def _captured_forwards(self) -> set[GraphKey]:
        return {*(key.forward for key in self.captured), *self.forwards}

    def _drop_oldest(self) -> None:
        oldest = next(iter(self.captured))
        del self.captured[oldest]
        if all(key.forward != oldest.forward for key in self.captured):
            self.forwards.pop(oldest.forward, None)

    def outdate(self, keys: Iterable[GraphKey]) -> None:
        """There are better kernels for these shapes: they are captured again, with all that share their forward pass,
        when they are next used or between requests."""
        for forward in {key.forward for key in keys}:
            self.forwards.pop(forward, None)
            self.outdated.update((key, None) for key in self.captured if key.forward == forward)

    def capture_next(self) -> bool:
        """Capture a shape that is outdated or was needed or, while there is room, another one with a variant of
        sampling that steps have had, fine shapes last. False: there is none, or its kernels are not compiled."""
        has_room = len(self._captured_forwards) < self.table.most_graphs
        tables = (self.table.with_sampling, self.table.fine_with_sampling)
        others = (key for keys in tables for variant in self._variants for key in keys(variant) if has_room)
        keys = dict.fromkeys((*self.outdated, *self._needed, *self._of_rank(tuple(others))))
        missing = [key for key in keys if key not in self.captured or key in self.outdated]
        return any(self._try(key) is not None for key in missing[:_MOST_TRIED])

    def without_graph(self, output: SchedulerOutput, key: GraphKey) -> BatchShape:
        """The shape of a step that runs eagerly after `dispatch`, because its graph cannot be captured yet."""
        self.num_steps.subtract([key.kind])
        self.num_steps["eager"] += 1
        return BatchShape.of_step(output, None)

    def capture_first(self) -> None:
        """Capture `first_keys`."""
        self._capture_all(self.first_keys)

    def capture_common(self, has_kernels: Callable[[GraphKey], bool], most: int) -> None:
        """Capture those of the table's `common_keys` that have their kernels, until ``most`` graphs are captured. What
        shares its forward pass with another one is not counted: its sampling takes a tenth of the time."""
        keys = dict.fromkeys(self._of_rank(tuple(filter(has_kernels, self.table.common_keys))))
        forwards, chosen = self._captured_forwards, []
        for key in keys:
            if key.forward in forwards or len(forwards) < most:
                forwards.add(key.forward)
                chosen.append(key)
        self._capture_all(chosen)

    def drop_all(self) -> None:
        """Free the graphs. NCCL's communicators can only be destroyed after all graphs with their kernels: until then
        `torch.distributed.destroy_process_group` waits."""
        self.captured.clear()
        self.forwards.clear()

    def _capture_all(self, keys: Sequence[GraphKey]) -> None:
        for number, key in enumerate(keys):
            report_progress("graphs", number, len(keys))
            if key not in self.captured:
                self._try(key)

    @property
    def first_keys(self) -> tuple[GraphKey, ...]:
        """The shapes that are captured at the start."""
        return self._of_rank(self.table.first_keys)

    def _of_rank(self, keys: tuple[GraphKey, ...]) -> tuple[GraphKey, ...]:
        """``keys`` as this rank captures them: without sampling if its graphs end with the forward pass."""
        if self._includes_sampling:
            return keys
        return tuple(replace(key, sampling=None, drafting=None) for key in keys)

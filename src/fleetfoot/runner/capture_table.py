"""The batch shapes that are captured as graphs, and the shape that a batch runs in. No torch: the plan reports it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from fleetfoot.sampling.shape import PLAIN, SamplingVariant

SMALL = (1, 2, 4, 8, 16)
DECODE_STEP = 16
WIDER_STEP = 32
WIDER_STEP_FROM = 64
MIXED_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
MIXED_FOR_ALL = 512
"""Mixed batches up to this number of tokens are captured for every model, larger ones if launches dominate."""
LONGEST_MIXED_DECODE = 8192
"""Context of a decode in a captured mixed batch. There the prefill kernel processes decodes too, with one program for
each KV head, and a longer context would dominate the step."""
FULL_STEP_PADDING = 32
"""A mixed batch fills a step if at most 1 / this of ``max_num_batched_tokens`` is padding."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A captured shape."""

    kind: str
    """``decode``: one token for each request; ``uniform``: 1 + k tokens for each, k drafts; ``mixed``: any lengths."""
    num_reqs: int
    num_tokens: int
    sampling: SamplingVariant | None = PLAIN
    """The sampling of the step. None: the graph ends with the forward pass, because a request uses prompt logprobs,
    more than 256 logprobs, or a list of tokens that exceeds a row of the tables."""
    drafting: int | None = None
    """Number of drafts to propose at the end; 0: a drafter only fills its KV cache; None: no drafting."""


@dataclass(frozen=True, slots=True)
class CaptureTable:
    """The shapes, smallest first in each kind. A kind may be empty.

    Attributes:
        decode: requests in a pure decode.
        num_drafts: draft tokens of a uniform decode; 0: there is none.
        uniform: requests in a uniform decode with drafts.
        mixed: tokens in a small batch that holds prefills; padded to ``max_num_seqs`` requests.
        full_step: tokens in such a batch that fills a step, as chunks of prompts do under load; None: it runs eagerly,
            as in any case those do that are larger than ``mixed`` and do not fill a step.
        eager_capture: how many of the smallest decode shapes, with drafts if there are any, are captured at the start;
            the others when first needed.
    """

    decode: tuple[int, ...] = ()
    num_drafts: int = 0
    uniform: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    full_step: int | None = None
    max_num_seqs: int = 0
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
    ) -> CaptureTable:
        """The shapes for a configuration: none on a CPU, where there is nothing to replay, and none if eager.

        Args:
            most_mixed_tokens: size up to which mixed batches are captured.
            most_full_tokens: size up to which a batch that fills a step is captured.
        """
        if device == "cpu" or enforce_eager:
            return cls()
        sizes = decode_sizes(max_num_seqs)
        uniform = tuple(n for n in sizes if n * (1 + num_drafts) <= max_num_batched_tokens) if num_drafts else ()
        most_mixed = min(max_num_batched_tokens, max(most_mixed_tokens, MIXED_FOR_ALL))
        mixed = tuple(tokens for tokens in MIXED_TOKENS if tokens <= most_mixed)
        has_full_step = bool(mixed) and mixed[-1] < max_num_batched_tokens <= most_full_tokens
        full_step = max_num_batched_tokens if has_full_step else None
        return cls(sizes, num_drafts, uniform, mixed, full_step, max_num_seqs)

    def dispatch(
        self,
        *,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        is_uniform: bool,
        longest_decode: int = 0,
        sampling: SamplingVariant | None = PLAIN,
        drafting: int | None = None,
    ) -> GraphKey | None:
        """The smallest captured shape that holds a batch; None: it runs eagerly.

        Args:
            is_uniform: every request has ``max_query_len`` tokens and samples.
            longest_decode: as in `SchedulerOutput`.
            sampling, drafting: as in `GraphKey`.
        """
        if is_uniform and max_query_len == 1:
            size = _at_least(self.decode, num_reqs)
            return None if size is None else GraphKey("decode", size, size, sampling, drafting)
        if is_uniform and self.num_drafts and max_query_len == 1 + self.num_drafts:
            size = _at_least(self.uniform, num_reqs)
            if size is None:
                return None
            return GraphKey("uniform", size, size * (1 + self.num_drafts), sampling, drafting)
        if drafting is not None or longest_decode > LONGEST_MIXED_DECODE:
            return None
        size = _at_least(self.mixed_sizes, num_tokens)
        if size is None or (size == self.full_step and (size - num_tokens) * FULL_STEP_PADDING > size):
            return None
        return GraphKey("mixed", min(size, self.max_num_seqs), size, sampling)

    def num_bytes(self, num_layers: int, hidden_bytes: int) -> int:
        """Bytes of the graphs: the nodes of every shape, and the hidden states that it returns.

        Args:
            hidden_bytes: of the hidden state of one token.
        """
        num_tokens = sum(key.num_tokens for key in self.keys)
        return _VARIANTS * (len(self.keys) * num_layers * _BYTES_PER_LAYER + num_tokens * hidden_bytes)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens of the mixed shapes."""
        return self.mixed if self.full_step is None else (*self.mixed, self.full_step)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every shape, with plain sampling."""
        return (
            *(GraphKey("decode", size, size) for size in self.decode),
            *(GraphKey("uniform", size, size * (1 + self.num_drafts)) for size in self.uniform),
            *(GraphKey("mixed", min(size, self.max_num_seqs), size) for size in self.mixed_sizes),
        )

    @property
    def first_keys(self) -> tuple[GraphKey, ...]:
        """The shapes to capture at the start: the smallest decodes with plain sampling, and with drafts if any."""
        if not self.num_drafts:
            return self.keys[: self.eager_capture]
        sizes = self.uniform[: self.eager_capture]
        width = 1 + self.num_drafts
        return tuple(GraphKey("uniform", size, size * width, drafting=self.num_drafts) for size in sizes)


_BYTES_PER_LAYER = 96 * 1024
"""Bytes of one layer in a captured graph: a dozen kernels, each with its node and its arguments."""
_VARIANTS = 3
"""Graphs of one shape in the memory plan: one for each sampling variant in use, of which an engine with requests of one
kind has one or two."""


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, then in steps of 16 to 64 and of 32 beyond.

    A padding request costs little (no KV is read, and linear layers compute in tiles of 64 tokens), and a shape costs
    tens of milliseconds when it is captured.
    """
    sizes = [size for size in SMALL if size < max_num_seqs]
    size = SMALL[-1] + DECODE_STEP
    while size < max_num_seqs:
        sizes.append(size)
        size += DECODE_STEP if size < WIDER_STEP_FROM else WIDER_STEP
    return (*sizes, max_num_seqs)


def _at_least(sizes: tuple[int, ...], wanted: int) -> int | None:
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None

"""Optional parts of a step's sampling, and sizes of V2's per-row tables. No torch: the plan uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace

LIST_CAPACITY = 512
"""Entries that a row has for logit bias, bad words and stop tokens; OpenAI's API allows 300 biases."""
NUM_PLANES = 4
"""int32 of an entry; see `fleetfoot.kernels.sampling.logits_processors.ListedTokens`."""
NUM_FIELDS = 13
"""int32 or float32 parameters of a row."""
MASK_BITS = 32
GRAPH_LOGPROBS = 32
"""Top logprobs that a graph computes for rows with logprobs. A request with more ends its steps' graphs before
sampling."""


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """The optional parts of a step's sampling. A row has the same result in every variant with the parts it uses."""

    filters: bool = False
    """min-p, top-k and top-p."""
    other_filters: bool = False
    """Filters of rows without top-k, or with a large one, which take longer; with ``filters`` only."""
    logits_processors: bool = False
    """Penalties, logit bias, allowed tokens, bad words and min_tokens."""
    logprobs: int | None = None
    """The maximum number of top logprobs, beside that of the sampled token; None: no logprobs."""
    masks: bool = False
    """Token masks of grammars, which arrive after the forward pass has been queued: sampling is a graph of its own."""

    def captured(self) -> SamplingVariant:
        """The smallest of `VARIANTS` that has these parts. Their kernels return at once in rows without a part."""
        if self.masks:
            return MASKS
        is_rare = self.other_filters or self.logits_processors or self.logprobs is not None
        return EVERYTHING if is_rare else TOP_K if self.filters else PLAIN


PLAIN = SamplingVariant()
TOP_K = SamplingVariant(filters=True)
EVERYTHING = SamplingVariant(filters=True, other_filters=True, logits_processors=True, logprobs=GRAPH_LOGPROBS)
MASKS = replace(EVERYTHING, masks=True)
VARIANTS = PLAIN, TOP_K, EVERYTHING, MASKS
"""The parts that are captured and compiled together; four graphs cost less than one for each combination."""


def mask_size(vocab_size: int) -> int:
    """int32 words of a row's mask of allowed tokens."""
    return -(-vocab_size // MASK_BITS)


def row_size(vocab_size: int) -> int:
    """int32 words of a row in V2's tables: seed, fields, lists and mask."""
    return 2 + NUM_FIELDS + NUM_PLANES * LIST_CAPACITY + mask_size(vocab_size)


def grammar_mask_size(vocab_size: int) -> int:
    """int32 words of a row of logits in V2's masks of grammars: its index and its mask."""
    return 1 + mask_size(vocab_size)

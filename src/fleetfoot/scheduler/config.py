"""The limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a scheduler; sizes in tokens, requests and blocks.

    Raises:
        ValueError: they do not go together.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    priority: bool = False
    """False: first come, first served, whatever the requests' priorities."""
    num_drafts: int = 0
    """Draft tokens of each decode in a step that has drafts; 0: there is no speculative decoding."""
    num_lookahead: int = 0
    """Positions behind a step's tokens that need KV too: the drafts, where the drafter has a KV cache of its own."""
    num_stages: int = 1
    """Of the pipeline: the decodes are dealt out to as many steps, which are then of different requests."""
    kv_load_failure_policy: str = "recompute"
    """What becomes of a request whose KV could not be loaded: ``recompute`` or ``fail``."""

    def __post_init__(self) -> None:
        width = 1 + self.num_drafts
        if self.max_num_batched_tokens < self.max_num_seqs * width:
            of_each = f"{width} tokens (1 and {self.num_drafts} drafts)" if self.num_drafts else "a token"
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must hold {of_each} of each of max_num_seqs "
                f"({self.max_num_seqs}) requests: raise it to {self.max_num_seqs * width}, or set max_num_seqs to at "
                f"most {self.max_num_batched_tokens // width}"
            )
        if self.kv_load_failure_policy not in ("recompute", "fail"):
            raise ValueError(
                f"kv_load_failure_policy is {self.kv_load_failure_policy!r}; it can be 'recompute' or 'fail'"
            )

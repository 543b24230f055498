"""The limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup, most_tokens
from fleetfoot.records.request import Request
from fleetfoot.utils.validation import FieldError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a scheduler, which must not contradict each other; sizes in tokens, requests and blocks."""

    num_blocks: int
    """KV blocks of the cache; slabs, if it has several groups."""
    block_size: int
    """Tokens in a KV block."""
    max_num_seqs: int
    """Most requests that run at the same time."""
    max_num_batched_tokens: int
    """Most tokens in a step, drafts included."""
    enable_prefix_caching: bool = True
    """Whether requests share the blocks of equal prefixes."""
    enable_chunked_prefill: bool = True
    """Whether prompts may be split over several steps."""
    priority: bool = False
    """Whether requests are ordered by priority; False: first come, first served."""
    num_drafts: int = 0
    """Draft tokens of each decode in a step that verifies drafts; 0: no speculative decoding."""
    num_lookahead: int = 0
    """Positions after a step's tokens that need KV too: the drafts, if the drafter has a KV cache of its own."""
    num_stages: int = 1
    """Pipeline stages: the decodes are spread over as many steps in flight."""
    kv_load_failure_policy: str = "recompute"
    """After a failed load of its KV a request is computed (``recompute``) or ends with an error (``fail``)."""
    prompt_step_s: float | None = None
    """Seconds that the prompts in a step take at most while several clients have requests; None: any."""
    groups: tuple[KVGroup, ...] = ONE_GROUP
    max_snapshots: int | None = None
    """Most states in the prefix cache; None: what fits."""
    """Groups of layers; a request has a list of blocks in each."""

    def __post_init__(self) -> None:
        width = 1 + self.num_drafts
        if self.max_num_batched_tokens < self.max_num_seqs * width:
            of_each = f"{width} tokens (1 and {self.num_drafts} drafts)" if self.num_drafts else "a token"
            raise FieldError(
                "max_num_batched_tokens",
                f"({self.max_num_batched_tokens}) must hold {of_each} of each of max_num_seqs "
                f"({self.max_num_seqs}) requests: raise it to {self.max_num_seqs * width}, or set max_num_seqs to at "
                f"most {self.max_num_batched_tokens // width}",
            )
        if self.kv_load_failure_policy not in ("recompute", "fail"):
            raise FieldError(
                "kv_load_failure_policy",
                f"is {self.kv_load_failure_policy!r}; it can be 'recompute' or 'fail'",
                self.kv_load_failure_policy,
            )

    @property
    def most_tokens(self) -> int:
        """KV of a request that is alone, at most, in tokens. Two steps of it may be in flight, and begin a block."""
        queries = 2 * (1 + self.num_drafts) + self.num_lookahead + self.block_size
        if not self.enable_chunked_prefill:
            queries = max(queries, self.max_num_batched_tokens)
        return most_tokens(self.groups, self.block_size, self.num_blocks, queries)

    def check_fits(self, request: Request) -> None:
        """Raise ValueError, with what would fit, if a request cannot be scheduled even if it is alone."""
        room = self.most_tokens
        needed = request.max_total_tokens - 1  # the last token is never an input
        if needed > room:
            raise ValueError(
                f"request {request.request_id!r} needs KV for {needed} tokens ({request.num_prompt_tokens} of prompt "
                f"and {request.max_total_tokens - request.num_prompt_tokens} to generate, less one), and the whole "
                f"cache holds {room} ({self.num_blocks} {'blocks' if len(self.groups) == 1 else 'slabs'} of "
                f"{self.block_size}); shorten the prompt or set "
                f"max_tokens to at most {max(0, room + 1 - request.num_prompt_tokens)}"
            )
        budget = self.max_num_batched_tokens
        if not self.enable_chunked_prefill and request.num_prompt_tokens > budget:
            raise ValueError(
                f"request {request.request_id!r} has a prompt of {request.num_prompt_tokens} tokens, and a step holds "
                f"{budget}; raise max_num_batched_tokens or set enable_chunked_prefill=True"
            )

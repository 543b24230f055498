"""Batches for the tests of the preparation ops: hand-made ones at every border, and random ones."""

import random
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch

UNUSED_BLOCK = 2**31 - 1
"""Stands in block tables behind a request's blocks: an index made from it is far out of every tensor."""


@dataclass(frozen=True)
class Request:
    """A request of a batch; ``row`` -1 is padding."""

    row: int
    num_computed: int
    query_len: int
    prefill_len: int
    limit: int = 10**6
    """Positions from here on are dead."""


@dataclass(frozen=True)
class Batch:
    """Everything that any of the ops reads: `RowTables`, the step, and each op's own tensors."""

    block_size: int
    num_tokens: int
    """T"""
    table_width: int
    """W"""
    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    num_computed: torch.Tensor
    prefill_lens: torch.Tensor
    last_sampled: torch.Tensor
    draft_tokens: torch.Tensor
    limits: torch.Tensor
    block_table: torch.Tensor
    token_pages: torch.Tensor
    sampled: torch.Tensor
    target_tokens: torch.Tensor
    """``[n, k + 1]`` int64, mostly the drafts themselves, for `accept_drafts`."""
    invalid: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    target: torch.Tensor
    staged: torch.Tensor
    num_writes: int
    front_size: int

    def to(self, device: str) -> "Batch":
        """A copy, with strides that `Tensor.to` does not keep."""
        copies = {
            name: torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device).copy_(value)
            for name, value in self.tensors().items()
        }
        return replace(self, **copies)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    @property
    def num_reqs(self) -> int:
        return self.idx_mapping.shape[0]

    @property
    def is_uniform(self) -> bool:
        """Whether `prepare_decode` takes it."""
        first, *others = self.query_start_loc.diff().tolist()
        is_full = self.num_tokens == int(self.query_start_loc[-1])
        return is_full and {first, *others} == {first} and 1 <= first <= 1 + self.draft_tokens.shape[1]


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(
    requests: list[Request], *, seed: int = 0, block_size: int = 16, max_blocks: int = 8, num_rows: int = 16,
    num_drafts: int = 0, padding_tokens: int = 0, num_sampling: int | None = None, spare_width: int = 0,
) -> Batch:  # fmt: skip
    """A batch of ``requests`` in rows among others that hold leftovers, with tokens, blocks and samples at random.

    Args:
        padding_tokens: T reaches so far past the last request.
        num_sampling: m; None: all requests sample.
        spare_width: elements between rows of the block table, and columns of W more than needed.
    """
    rng = random.Random(seed)
    num_blocks = num_rows * max_blocks
    block_ids = rng.sample(range(num_blocks), num_blocks)
    wide_table = torch.full((num_rows, max_blocks + spare_width), UNUSED_BLOCK, dtype=torch.int32)
    # unused rows look like requests that have just ended at the longest length
    num_computed, prefill_lens = [max_blocks * block_size] * num_rows, [max_blocks * block_size] * num_rows
    limits = [0] * num_rows
    starts, most_blocks = [0], 1
    for row, computed, query_len, prefill_len, limit in map(astuple, requests):
        starts.append(starts[-1] + query_len)
        if row >= 0:
            num_computed[row], prefill_lens[row], limits[row] = computed, prefill_len, limit
            used = -(-(computed + query_len) // block_size)
            most_blocks = max(most_blocks, used)
            wide_table[row, :used] = int32(block_ids[row * max_blocks : row * max_blocks + used])

    sampling = requests[:num_sampling]
    num_sampled = [rng.randint(0, num_drafts + 1) for _ in sampling]
    arena_size, capacity, front_size = 1000, 300, rng.choice((9, 256, 521))
    pairs = [x for index in rng.sample(range(arena_size), capacity) for x in (index, rng.randrange(-(2**31), 2**31))]

    def token_ids(*shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        return torch.randint(0, 150_000, shape, dtype=torch.int32, generator=generator)

    draft_tokens = token_ids(num_rows + 1, num_drafts)
    for row in range(num_rows):
        if num_drafts and rng.random() < 0.3:
            draft_tokens[row, rng.randrange(num_drafts) :] = -1  # fewer were found
    rows = [request.row for request in requests]
    target_tokens = torch.cat((draft_tokens[rows].long(), torch.zeros(len(rows), 1, dtype=torch.int64)), 1)
    target_tokens[torch.tensor([[rng.random() < 0.2 for _ in range(num_drafts + 1)] for _ in rows])] = 7
    invalid = torch.tensor([[rng.random() < 0.1 for _ in range(num_drafts + 1)] for _ in rows])

    return Batch(
        block_size=block_size,
        num_tokens=starts[-1] + padding_tokens,
        table_width=min(most_blocks + spare_width, max_blocks),
        idx_mapping=int32([request.row for request in requests]),
        query_start_loc=int32(starts),
        num_computed=int32(num_computed),
        prefill_lens=int32(prefill_lens),
        last_sampled=token_ids(num_rows),
        draft_tokens=draft_tokens,
        limits=int32(limits),
        block_table=wide_table[:, :max_blocks],
        token_pages=token_ids(num_blocks * block_size),
        sampled=token_ids(len(sampling), num_drafts + 1),
        target_tokens=target_tokens,
        invalid=invalid,
        num_sampled=int32(num_sampled),
        num_rejected=int32([rng.randint(0, request.query_len) for request in sampling]),
        target=torch.arange(arena_size, dtype=torch.int32),
        staged=int32([*range(front_size), *pairs, *[0] * (521 - front_size)]),
        num_writes=rng.choice((0, 1, 256, 257, capacity)),
        front_size=front_size,
    )


def decode(row: int, length: int, drafts: int = 0) -> Request:
    return Request(row, length, 1 + drafts, prefill_len=max(length - 3, 1))


def prefill(row: int, begin: int, query_len: int, prompt_len: int | None = None) -> Request:
    return Request(row, begin, query_len, prompt_len or begin + query_len)


def padding(query_len: int = 0) -> Request:
    return Request(-1, 0, query_len, 0)


def random_batch(seed: int) -> Batch:
    """Decodes with and without drafts, whole and chunked prefills, empty requests and padding, in any order."""
    rng = random.Random(seed)
    block_size, max_blocks, num_drafts = rng.choice((1, 16, 24, 64)), rng.randint(4, 40), rng.choice((0, 0, 1, 4))
    max_len, num_rows = block_size * max_blocks, rng.randint(3, 60)
    num_drafts = min(num_drafts, max_len - 1)
    requests = []
    for row in rng.sample(range(num_rows), rng.randint(1, num_rows)):
        if rng.random() < 0.2:
            requests.append(padding(rng.choice((0, 1, 3))))
            continue
        drafts = rng.randint(0, num_drafts)
        length = rng.randint(0, max_len - 1 - drafts)
        longest = max_len - length
        kinds = (
            decode(row, length, drafts),
            prefill(row, length, rng.randint(1, longest)),
            prefill(row, length, rng.randint(1, longest), prompt_len=max_len),
            Request(row, length, 0, prefill_len=rng.randint(0, max_len)),
            # the known tokens end within the query
            Request(row, length, 1 + drafts, prefill_len=length + rng.randint(0, drafts)),
            # the request's last positions, and some behind them
            Request(row, length, 1 + drafts, max(length - 3, 1), length + rng.randint(0, drafts)),
        )
        requests.append(rng.choice(kinds))
    return make_batch(
        requests,
        seed=seed,
        block_size=block_size,
        max_blocks=max_blocks,
        num_rows=num_rows,
        num_drafts=num_drafts,
        padding_tokens=rng.choice((0, 0, 1, 30)),
        num_sampling=rng.choice((None, rng.randint(0, len(requests)))),
        spare_width=rng.choice((0, 3)),
    )


def _block_borders() -> Batch:
    """Contexts and queries that end before, at and behind the border of a block."""
    size = 16
    begins, query_lens = (0, size - 1, size, size + 1, 2 * size), (1, size - 1, size, size + 1)
    spans = [(begin, query_len) for begin in begins for query_len in query_lens]
    requests = [prefill(row, begin, query_len) for row, (begin, query_len) in enumerate(spans)]
    return make_batch(requests, num_rows=len(spans), block_size=size)


def _many_mixed() -> Batch:
    decodes = [decode(row, 1 + row % 120, drafts=row % 3) for row in range(0, 1800, 2)]
    prefills = [prefill(row, row % 32, 1 + row % 17) for row in range(1, 249, 2)]
    return make_batch(decodes + prefills, num_rows=1800, num_drafts=2, padding_tokens=100, num_sampling=960)


BATCHES: dict[str, Callable[[], Batch]] = {
    "one_decode": lambda: make_batch([decode(3, 17)]),
    "one_decode_with_drafts": lambda: make_batch([decode(3, 17, drafts=4)], num_drafts=4),
    "fewer_drafts_than_room": lambda: make_batch([decode(3, 17, drafts=1), decode(2, 5, drafts=1)], num_drafts=4),
    "one_token_prompt": lambda: make_batch([prefill(0, 0, 1)]),
    "one_prefill": lambda: make_batch([prefill(15, 0, 37)]),
    "one_prefill_chunk": lambda: make_batch([prefill(15, 16, 16, prompt_len=100)], num_sampling=0),
    "last_known_token_is_a_decode": lambda: make_batch([decode(1, 20), prefill(2, 20, 1), decode(3, 1)]),
    "block_borders": _block_borders,
    "longest": lambda: make_batch([decode(2, 127), decode(1, 123, drafts=4), prefill(0, 0, 128)], num_drafts=4),
    "longest_uniform": lambda: make_batch([decode(15, 123, drafts=4), decode(0, 123, drafts=4)], num_drafts=4),
    "empty_requests": lambda: make_batch(
        [Request(r, 9, 0, 20) if r in (0, 3, 4, 7) else prefill(r, 9, 5) for r in range(8)], padding_tokens=3
    ),
    "all_empty": lambda: make_batch([Request(0, 9, 0, 20), Request(1, 0, 0, 4)]),
    "all_empty_and_padded": lambda: make_batch([Request(0, 9, 0, 20)], padding_tokens=7),
    "padding_behind": lambda: make_batch([decode(3, 17), decode(4, 40), padding(), padding()], padding_tokens=2),
    "padding_with_tokens": lambda: make_batch([decode(3, 17), decode(4, 40), padding(1), padding(1)]),
    "padding_between": lambda: make_batch(
        [padding(2), decode(3, 17, 1), padding(0), padding(2), decode(0, 40, 1)], num_drafts=1
    ),
    "padding_between_uniform": lambda: make_batch(
        [padding(3), decode(3, 17, 2), padding(3), decode(15, 40, 2), padding(3)], num_drafts=2
    ),
    "limits_within_the_query": lambda: make_batch(
        [Request(r, 10 + r, 4, 8, limit=10 + r + r % 6 - 1) for r in range(12)], num_drafts=3
    ),
    "all_padding": lambda: make_batch([padding(1)] * 4),
    "known_tokens_end_within_the_query": lambda: make_batch(
        [Request(r, 10, 4, prefill_len=9 + r) for r in range(7)], num_drafts=3
    ),
    "decodes_fill_a_tile": lambda: make_batch([decode(r, r % 128) for r in range(256)], num_rows=256),
    "full_tile": lambda: make_batch([prefill(0, 0, 100), prefill(1, 28, 100), prefill(2, 10, 55)], padding_tokens=1),
    "tokens_overflow_a_tile": lambda: make_batch([prefill(0, 1, 127), prefill(1, 0, 128), prefill(2, 4, 3)]),
    "table_wider_than_a_tile": lambda: make_batch(
        [decode(0, 1090), decode(1, 1023), decode(2, 1024)], block_size=1, max_blocks=1100, num_rows=3, spare_width=9
    ),
    "1024_decodes": lambda: make_batch([decode(r, r % 120) for r in reversed(range(1024))], num_rows=1024),
    "1024_mixed": _many_mixed,
    "graph_full": lambda: make_batch([decode(r, 9 * r, 2) for r in range(8)], num_drafts=2, spare_width=8),
    "graph_padded": lambda: make_batch(
        [decode(r, 3 * r, 2) for r in (15, 3, 0, 8, 1)] + [padding(3)] * 3, num_drafts=2, spare_width=8, seed=1
    ),
    **{f"random_{seed}": lambda seed=seed: random_batch(seed) for seed in range(8)},  # type: ignore[misc]
}


@cache
def get_batch(name: str) -> Batch:
    return BATCHES[name]()


def uniform_batches() -> list[str]:
    return [name for name in BATCHES if get_batch(name).is_uniform]

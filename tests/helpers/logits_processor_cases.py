"""Batches whose rows have logits processors in all combinations, for tests on a CPU and on a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from fleetfoot.kernels.sampling.logits_processors import (
    BIASES,
    PREFIX_ENDS,
    PREFIX_TOKENS,
    TOKENS,
    ListedTokens,
    LogitsProcessorTables,
    TokenHistory,
)
from fleetfoot.sampling.shape import NUM_PLANES

BLOCK_SIZE, CAPACITY = 4, 160


@dataclass
class RowParams:
    """The parameters of one row."""

    prompt_len: int = 0
    biases: dict[int, float] = field(default_factory=dict)
    words: list[list[int]] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    min_tokens: int = 0
    allowed: list[int] | None = None
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@dataclass(frozen=True)
class ProcessorCase:
    """A batch: ``rows`` of logits, some of them padding, some of the same request."""

    logits: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    tables: LogitsProcessorTables
    params: list[RowParams]
    sequences: list[list[int]]

    def to(self, device: str) -> ProcessorCase:
        """The same on another device."""
        return _moved(self, device)


def _moved(record: Any, device: str) -> Any:
    if isinstance(record, torch.Tensor):
        return record.to(device)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    return replace(record, **{entry.name: _moved(getattr(record, entry.name), device) for entry in fields(record)})


def processor_case(
    seed: int, logits: torch.Tensor | None = None, vocab_size: int = 64, num_rows: int = 6
) -> ProcessorCase:
    """Random parameters and sequences.

    Args:
        logits: the same for every row; None: random ones in bfloat16.
    """
    rng = random.Random(seed)
    if logits is not None:
        vocab_size = logits.shape[1]
    small = min(vocab_size, 12)  # few distinct tokens are generated, so that they repeat
    sequences = [[rng.randrange(small) for _ in range(rng.randint(5, 40))] for _ in range(num_rows)]
    params = [_row_params(rng, sequence, vocab_size) for sequence in sequences]
    rows = [rng.choice([-1, *range(num_rows)]) for _ in range(3)] + [*range(num_rows), -1]
    seq_lens = [rng.randint(max(1, params[row].prompt_len), len(sequences[row])) if row >= 0 else 0 for row in rows]
    seq_lens[3:-1] = [len(sequence) for sequence in sequences]
    if logits is None:
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(len(rows), vocab_size, generator=generator) * 3).to(torch.bfloat16)
    else:
        logits = logits.expand(len(rows), -1).contiguous()

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    sizes = (ints([len(getattr(row, name)) for row in params]) for name in ("biases", "words", "stops"))
    names = ("repetition", "frequency", "presence")
    return ProcessorCase(
        logits,
        ints(rows),
        ints(seq_lens),
        LogitsProcessorTables(
            *_allowed(params, vocab_size),
            ListedTokens(_planes(params), *sizes, ints([row.min_tokens for row in params])),
            *(torch.tensor([getattr(row, name) for row in params]) for name in names),
            history=_history(rng, sequences, ints([row.prompt_len for row in params])),
        ),
        params,
        sequences,
    )


def _row_params(rng: random.Random, sequence: list[int], vocab_size: int) -> RowParams:
    params = RowParams(prompt_len=rng.randint(1, len(sequence)))
    if rng.random() < 0.5:
        params.biases = {token: rng.uniform(-5, 5) for token in rng.sample(range(vocab_size), vocab_size // 2)}
    if rng.random() < 0.6:  # the prefixes of some are the end of the sequence
        params.words = [[*sequence[-size:], rng.randrange(vocab_size)] for size in (1, 2, 3, 30)]
        params.words += [[rng.randrange(vocab_size) for _ in range(size)] for size in (1, 1, 2, 4)]
    if rng.random() < 0.6:
        params.stops, params.min_tokens = rng.sample(range(vocab_size), 3), rng.randint(1, 40)
    if rng.random() < 0.4:
        params.allowed = [rng.randrange(vocab_size) for _ in range(vocab_size // 3)]
    for name, low, high in (("repetition", 0.5, 2), ("frequency", -2, 2), ("presence", -2, 2)):
        if rng.random() < 0.5:
            setattr(params, name, rng.uniform(low, high))
    return params


def _history(rng: random.Random, sequences: list[list[int]], prompt_lens: torch.Tensor) -> TokenHistory:
    num_blocks = [-(-len(sequence) // BLOCK_SIZE) for sequence in sequences]
    blocks = rng.sample(range(sum(num_blocks) + 5), sum(num_blocks))
    tables = torch.full((len(sequences), max(num_blocks) + 1), -1, dtype=torch.int32)
    pages = torch.zeros((sum(num_blocks) + 5) * BLOCK_SIZE, dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        own = [blocks.pop() for _ in range(num_blocks[row])]
        tables[row, : len(own)] = torch.tensor(own)
        for position, token in enumerate(sequence):
            pages[own[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = token
    return TokenHistory(tables, pages, prompt_lens, BLOCK_SIZE)


def _allowed(params: list[RowParams], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    bits = np.zeros((len(params), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, one in enumerate(params):
        bits[row, one.allowed or []] = 1
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    is_limited = torch.tensor([one.allowed is not None for one in params], dtype=torch.int32)
    return is_limited, torch.from_numpy(masks)


def _planes(params: list[RowParams]) -> torch.Tensor:
    planes = torch.randint(0, 5, (len(params), NUM_PLANES, CAPACITY), dtype=torch.int32)  # unused entries are random
    for row, one in enumerate(params):
        entries = [*one.biases, *(word[-1] for word in one.words), *one.stops]
        prefixes = [[] for _ in one.biases] + [word[:-1] for word in one.words] + [[] for _ in one.stops]
        flat = [token for prefix in prefixes for token in prefix]
        planes[row, TOKENS, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        planes[row, PREFIX_ENDS, : len(entries)] = torch.tensor([len(p) for p in prefixes]).cumsum(0).to(torch.int32)
        planes[row, PREFIX_TOKENS, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        biases = torch.tensor(list(one.biases.values()))
        planes[row, BIASES, : len(biases)] = biases.view(torch.int32)
    return planes

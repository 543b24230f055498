"""Rows that want edits of their logits, in all combinations, for the edits' tests on a CPU and on a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fleetfoot.kernels.sampling.records import (
    BIASES,
    NUM_PLANES,
    PREFIX_ENDS,
    PREFIX_TOKENS,
    TOKENS,
    AllowedTokens,
    ListedTokens,
    Penalties,
    TokenHistory,
)

BLOCK_SIZE, CAPACITY = 4, 160


@dataclass
class Wish:
    """What a row wants."""

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
class EditCase:
    """A batch: ``rows`` of logits, some of them padding, some of the same request."""

    logits: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    history: TokenHistory
    allowed: AllowedTokens
    listed: ListedTokens
    penalties: Penalties
    wishes: list[Wish]
    sequences: list[list[int]]

    def to(self, device: str) -> EditCase:
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("logits", "rows", "seq_lens")}
        for name in ("history", "allowed", "listed", "penalties"):
            record = getattr(self, name)
            tensors = {
                key: value for key in record.__slots__ if isinstance(value := getattr(record, key), torch.Tensor)
            }
            moved[name] = replace(record, **{key: tensor.to(device) for key, tensor in tensors.items()})
        return replace(self, **moved)


def edit_case(seed: int, logits: torch.Tensor | None = None, vocab_size: int = 64, num_rows: int = 6) -> EditCase:
    """Random wishes and sequences.

    Args:
        logits: the same for every row; None: random ones in bfloat16.
    """
    rng = random.Random(seed)
    if logits is not None:
        vocab_size = logits.shape[1]
    small = min(vocab_size, 12)  # few tokens are generated, so that they repeat
    sequences = [[rng.randrange(small) for _ in range(rng.randint(5, 40))] for _ in range(num_rows)]
    wishes = [_wish(rng, sequence, vocab_size) for sequence in sequences]
    rows = [rng.choice([-1, *range(num_rows)]) for _ in range(3)] + [*range(num_rows), -1]
    seq_lens = [rng.randint(max(1, wishes[row].prompt_len), len(sequences[row])) if row >= 0 else 0 for row in rows]
    seq_lens[3:-1] = [len(sequence) for sequence in sequences]
    generator = torch.Generator().manual_seed(seed)
    if logits is None:
        logits = (torch.randn(len(rows), vocab_size, generator=generator) * 3).to(torch.bfloat16)
    else:
        logits = logits.expand(len(rows), -1).contiguous()
    ints = {
        name: torch.tensor([getattr(wish, name) for wish in wishes], dtype=torch.int32)
        for name in ("prompt_len", "min_tokens")
    }
    lengths = {
        name: torch.tensor([len(getattr(wish, name)) for wish in wishes], dtype=torch.int32)
        for name in ("biases", "words", "stops")
    }
    return EditCase(
        logits,
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        _history(rng, sequences, ints["prompt_len"]),
        _allowed(wishes, vocab_size),
        ListedTokens(_planes(wishes), lengths["biases"], lengths["words"], lengths["stops"], ints["min_tokens"]),
        Penalties(*(torch.tensor([getattr(w, n) for w in wishes]) for n in ("repetition", "frequency", "presence"))),
        wishes,
        sequences,
    )


def _wish(rng: random.Random, sequence: list[int], vocab_size: int) -> Wish:
    wish = Wish(prompt_len=rng.randint(1, len(sequence)))
    if rng.random() < 0.5:
        wish.biases = {token: rng.uniform(-5, 5) for token in rng.sample(range(vocab_size), vocab_size // 2)}
    if rng.random() < 0.6:  # some end as the sequence does
        wish.words = [[*sequence[-size:], rng.randrange(vocab_size)] for size in (1, 2, 3, 30)]
        wish.words += [[rng.randrange(vocab_size) for _ in range(size)] for size in (1, 1, 2, 4)]
    if rng.random() < 0.6:
        wish.stops, wish.min_tokens = rng.sample(range(vocab_size), 3), rng.randint(1, 40)
    if rng.random() < 0.4:
        wish.allowed = [rng.randrange(vocab_size) for _ in range(vocab_size // 3)]
    if rng.random() < 0.5:
        wish.repetition = rng.uniform(0.5, 2)
    if rng.random() < 0.5:
        wish.frequency = rng.uniform(-2, 2)
    if rng.random() < 0.5:
        wish.presence = rng.uniform(-2, 2)
    return wish


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


def _allowed(wishes: list[Wish], vocab_size: int) -> AllowedTokens:
    bits = np.zeros((len(wishes), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, wish in enumerate(wishes):
        bits[row, wish.allowed or []] = 1
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    is_limited = torch.tensor([wish.allowed is not None for wish in wishes], dtype=torch.int32)
    return AllowedTokens(is_limited, torch.from_numpy(masks))


def _planes(wishes: list[Wish]) -> torch.Tensor:
    planes = torch.randint(0, 5, (len(wishes), NUM_PLANES, CAPACITY), dtype=torch.int32)  # what is behind means nothing
    for row, wish in enumerate(wishes):
        entries = [*wish.biases, *(word[-1] for word in wish.words), *wish.stops]
        prefixes = [[] for _ in wish.biases] + [word[:-1] for word in wish.words] + [[] for _ in wish.stops]
        flat = [token for prefix in prefixes for token in prefix]
        planes[row, TOKENS, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        planes[row, PREFIX_ENDS, : len(entries)] = torch.tensor([len(p) for p in prefixes]).cumsum(0).to(torch.int32)
        planes[row, PREFIX_TOKENS, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        biases = torch.tensor(list(wish.biases.values()))
        planes[row, BIASES, : len(biases)] = biases.view(torch.int32)
    return planes

"""Token arrays for training: many documents, generated and tokenized in parallel processes."""

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from corpus import document
from tokenizers import Tokenizer

CHUNK_DOCUMENTS = 1000


@dataclass(frozen=True)
class TokenData:
    """Documents behind one another.

    Attributes:
        ids: token ids. [num_tokens] uint16
        starts: where each document starts, that is, where its `<|begin|>` stands. [num_documents] int64
        nats_per_token: an upper bound of the text's entropy, which is a lower bound of what a model's loss can be
            (but for the choices that give the same text).
    """

    ids: np.ndarray
    starts: np.ndarray
    nats_per_token: float

    def save(self, path: Path) -> None:
        """Write to an .npz file."""
        np.savez(path, ids=self.ids, starts=self.starts, nats_per_token=self.nats_per_token)

    @staticmethod
    def load(path: Path) -> "TokenData":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return TokenData(arrays["ids"], arrays["starts"], float(arrays["nats_per_token"]))


class _Chunk(NamedTuple):
    ids: np.ndarray  # [num_tokens] uint16
    lengths: list[int]
    nats: float


def _encode_chunk(arguments: tuple[str, str, int, int]) -> _Chunk:
    tokenizer_path, split, first, count = arguments
    documents = [document(f"{split} {seed}") for seed in range(first, first + count)]
    tokenizer = Tokenizer.from_file(tokenizer_path)
    encoded = [tokenizer.encode(made.text, add_special_tokens=False).ids for made in documents]
    ids = np.concatenate([np.asarray(row, dtype=np.uint16) for row in encoded])
    return _Chunk(ids, [len(row) for row in encoded], sum(made.nats for made in documents))


def make_data(tokenizer_path: Path, split: str, num_documents: int, workers: int) -> TokenData:
    """The tokens of `num_documents` documents.

    Args:
        tokenizer_path: the tokenizer.json.
        split: "train" or "held-out"; part of each document's seed, so that the splits differ.
        num_documents: how many.
        workers: processes to use; the result does not depend on it.
    """
    jobs = [
        (str(tokenizer_path), split, first, min(CHUNK_DOCUMENTS, num_documents - first))
        for first in range(0, num_documents, CHUNK_DOCUMENTS)
    ]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        chunks = pool.map(_encode_chunk, jobs)
    ids = np.concatenate([chunk.ids for chunk in chunks])
    lengths = np.concatenate([chunk.lengths for chunk in chunks])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return TokenData(ids, starts, sum(chunk.nats for chunk in chunks) / len(ids))

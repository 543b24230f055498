"""Batches of rows with logits processors in all combinations, for tests on a CPU and on a GPU."""

import random
from array import array
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from fleetfoot.kernels.sampling.logits_processors import LogitsProcessorTables
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.v2.device import CpuDevice
from fleetfoot.runner.v2.state import DeviceState

BLOCK_SIZE, MAX_LEN = 4, 48


@dataclass(frozen=True)
class ProcessorCase:
    """A batch: ``rows`` of logits, some of them padding, some of the same request."""

    logits: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    tables: LogitsProcessorTables
    requests: list[NewRequest]
    """By row."""

    def to(self, device: str) -> "ProcessorCase":
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
    """Random parameters and sequences, in the tables that the runner's state has.

    Args:
        logits: the same for every row; None: random ones in bfloat16.
    """
    rng = random.Random(seed)
    if logits is not None:
        vocab_size = logits.shape[1]
    num_blocks = MAX_LEN // BLOCK_SIZE
    sizes = {"num_blocks": num_rows * num_blocks, "block_size": BLOCK_SIZE}
    sizes |= {"max_num_seqs": num_rows, "max_model_len": MAX_LEN, "max_num_batched_tokens": MAX_LEN * num_rows}
    state = DeviceState(CpuDevice(), vocab_size=vocab_size, **sizes)
    state.sampling.logits_processors.listed.planes.random_(0, 5)  # unused entries are random
    blocks = rng.sample(range(num_rows * num_blocks), num_rows * num_blocks)
    requests = [_request(rng, row, blocks[row::num_rows], vocab_size) for row in range(num_rows)]
    state.staging.begin()
    for request in requests:
        state.stage_request(request)
    state.staging.apply_staged_writes([], np.zeros(1, dtype=np.int32), 0)
    lengths = [len(request.token_ids) for request in requests]
    rows = [rng.choice([-1, *range(num_rows)]) for _ in range(3)] + [*range(num_rows), -1]
    seq_lens = [rng.randint(requests[row].num_prompt_tokens, lengths[row]) if row >= 0 else 0 for row in rows]
    seq_lens[3:-1] = lengths
    if logits is None:
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(len(rows), vocab_size, generator=generator) * 3).to(torch.bfloat16)
    else:
        logits = logits.expand(len(rows), -1).contiguous()
    numbers = torch.tensor([rows, seq_lens], dtype=torch.int32)
    return ProcessorCase(logits, *numbers, state.sampling.logits_processors, requests)


def _request(rng: random.Random, row: int, block_ids: list[int], vocab_size: int) -> NewRequest:
    # few distinct tokens are generated, so that they repeat
    tokens = [rng.randrange(min(vocab_size, 12)) for _ in range(rng.randint(5, 40))]
    params: dict[str, Any] = {}
    words: list[list[int]] = []
    if rng.random() < 0.5:
        biased = rng.sample(range(vocab_size), vocab_size // 2)
        params["logit_bias"] = {token: rng.uniform(-5, 5) for token in biased}
    if rng.random() < 0.6:  # the prefixes of some are the end of the sequence
        words = [[*tokens[-size:], rng.randrange(vocab_size)] for size in (1, 2, 3, 30)]
        words += [[rng.randrange(vocab_size) for _ in range(size)] for size in (1, 1, 2, 4)]
    if rng.random() < 0.6:
        params["min_tokens"] = rng.randint(1, 40)
    if rng.random() < 0.4:
        params["allowed_token_ids"] = [rng.randrange(vocab_size) for _ in range(vocab_size // 3)]
    for name, low, high in (("repetition", 0.5, 2), ("frequency", -2, 2), ("presence", -2, 2)):
        if rng.random() < 0.5:
            params[f"{name}_penalty"] = rng.uniform(low, high)
    num_prompt_tokens, stop = rng.randint(1, len(tokens)), frozenset(rng.sample(range(vocab_size), 3))
    sampling = SamplingParams(max_tokens=None, **params)
    return NewRequest(str(row), row, array("i", tokens), num_prompt_tokens, 0, block_ids, sampling, 0, stop, words)

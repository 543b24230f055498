"""Compiles the kernels of logits processors and logprobs for an H100, on any machine: run as a module, without
``TRITON_INTERPRET``."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch

from fleetfoot.kernels.runtime.triton_support import TritonKernel
from fleetfoot.kernels.sampling.logits_processors_triton import process_logits_triton
from fleetfoot.kernels.sampling.token_logprobs import select_logprobs
from tests.helpers.compile_op_kernels import compile_instead
from tests.helpers.logits_processor_cases import processor_case


def main() -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("fleetfoot.kernels.") and hasattr(module, "can_overlap"):
            module.can_overlap = lambda device: True  # type: ignore[attr-defined]
    case = processor_case(0)
    logits = process_logits_triton(case.logits, case.rows, case.seq_lens, case.tables)
    sampled = torch.zeros(len(logits), dtype=torch.int64)
    select_logprobs(torch.empty(len(logits), 40000), sampled, 32, sizes=case.rows, rows=case.rows)
    for vocab_size in (5, 2049, 40000):  # one piece, two, many
        for num in (0, 5):
            select_logprobs(torch.empty(len(logits), vocab_size), sampled, num)


if __name__ == "__main__":
    with patch.object(TritonKernel, "__getitem__", compile_instead):
        main()

"""Compiles the kernels of step preparation, logits processors and logprobs for an H100, on any machine. Run as a
module, without ``TRITON_INTERPRET``."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch

from fleetfoot.kernels.prepare.tables import RowTables
from fleetfoot.kernels.runtime.triton_support import TritonKernel
from tests.helpers.compile_op_kernels import compile_instead
from tests.helpers.kernels import triton_kernels
from tests.helpers.logits_processor_cases import processor_case
from tests.helpers.prepare_runs import OPS, run


def main() -> None:
    kernels = triton_kernels()
    for op in OPS:
        run(kernels, op, "one_decode_with_drafts")
    one = torch.zeros(1, dtype=torch.int32)
    rows = RowTables(one, one, one, one, one.new_zeros((2, 3)), one[None], one, 16)
    kernels.propose_ngrams(one, one, rows, 5, 1)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("fleetfoot.kernels.") and hasattr(module, "can_overlap"):
            module.can_overlap = lambda device: True  # type: ignore[attr-defined]
    case = processor_case(0)
    logits = kernels.process_logits(case.logits, case.rows, case.seq_lens, case.tables)
    sampled = torch.zeros(len(logits), dtype=torch.int64)
    kernels.token_logprobs(torch.empty(len(logits), 40000), sampled, 32, sizes=case.rows, rows=case.rows)
    for vocab_size in (5, 2049, 40000):  # one tile, two, many
        for num in (0, 5):
            kernels.token_logprobs(torch.empty(len(logits), vocab_size), sampled, num)


if __name__ == "__main__":
    with patch.object(TritonKernel, "__getitem__", compile_instead):
        main()

"""Compiles the kernels that edit logits and select logprobs for an H100, on any machine: run as a module, without
``TRITON_INTERPRET``."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch

from fleetfoot.kernels.runtime.triton_support import TritonKernel
from fleetfoot.kernels.sampling.allowed_tokens import keep_allowed_tokens_triton
from fleetfoot.kernels.sampling.listed_tokens import edit_listed_tokens_triton
from fleetfoot.kernels.sampling.paged_penalties import penalize_triton
from fleetfoot.kernels.sampling.token_logprobs_triton import token_logprobs_triton
from tests.helpers.compile_op_kernels import compile_instead
from tests.helpers.edit_cases import edit_case


def main() -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("fleetfoot.kernels.") and hasattr(module, "can_overlap"):
            module.can_overlap = lambda device: True  # type: ignore[attr-defined]
    case = edit_case(0)
    logits = keep_allowed_tokens_triton(case.logits, case.rows, case.allowed)
    edit_listed_tokens_triton(logits, case.rows, case.seq_lens, case.history, case.listed)
    penalize_triton(logits, case.rows, case.seq_lens, case.history, case.penalties)
    chosen = torch.zeros(len(logits), dtype=torch.int64)
    token_logprobs_triton(torch.empty(len(logits), 40000), chosen, 32, sizes=case.rows, rows=case.rows)
    for vocab_size in (5, 2049, 40000):  # one piece, two, many
        for num in (0, 5):
            token_logprobs_triton(torch.empty(len(logits), vocab_size), chosen, num)


if __name__ == "__main__":
    with patch.object(TritonKernel, "__getitem__", compile_instead):
        main()

"""What drafts gain at a given acceptance: milliseconds per token with 0, 1, 2, ... drafts.

    python benchmarks/gpu_drafts.py MODEL [--method mtp] [--drafts 0 1 2 3] [--acceptance 0.7 0] [--batch 1]

Dummy weights, random prompts of 128 tokens, 257 greedy tokens each. Drafts of dummy weights are wrong, so acceptance is
forced: before the target's tokens are compared with the drafts, each draft is replaced by the target's token with the
probability ``--acceptance``, and by another token otherwise. Everything else runs as always: the drafter, the
verification of all drafts, `AdaptiveDrafts` (``--not-adaptive``: without it). One JSON line for each number of drafts
and acceptance, every engine in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

LENGTH, NUM_TOKENS = 128, 257


def force_acceptance(probability: float) -> None:
    """Let every `DraftVerification` made from now on accept a draft with ``probability``, by a hash of its position."""
    import torch

    from fleetfoot.sampling import verification

    make = verification.DraftVerification.__init__

    def accept_by_chance(accept: Any, idx_mapping: Any, sampled: Any, invalid: Any, rows: Any, counts: Any) -> None:
        num_drafts = sampled.shape[1] - 1
        row = torch.where(idx_mapping >= 0, idx_mapping, rows.draft_tokens.shape[0] - 1).long()  # the last: padding
        place = rows.num_computed[idx_mapping.clamp(min=0)].long()[:, None] * 64 + torch.arange(
            num_drafts, device=row.device
        )  # [n, d]
        chance = ((place * 2654435761) >> 12) & 0xFFFF
        tokens = sampled[:, :-1]
        chosen = torch.where(chance < probability * 0x10000, tokens, (tokens + 1) % 1000)
        rows.draft_tokens[row, :num_drafts] = chosen.int()
        accept(idx_mapping, sampled, invalid, rows, counts)

    def forced(self: Any, rows: Any, accept_drafts: Any) -> None:
        make(self, rows, lambda *arguments: accept_by_chance(accept_drafts, *arguments))

    verification.DraftVerification.__init__ = forced  # type: ignore[method-assign]


def measure(args: argparse.Namespace, num_drafts: int, acceptance: float) -> dict[str, Any]:
    from fleetfoot import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if num_drafts:
        force_acceptance(acceptance)
        settings = {"method": args.method, "num_speculative_tokens": num_drafts, "adaptive": not args.not_adaptive}
        extra["speculative_config"] = settings
    llm = LLM(
        args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=False,
        gpu_memory_utilization=0.85, seed=0, **extra,
    )  # fmt: skip
    rng = random.Random(0)

    def seconds(num_tokens: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(10, 900) for _ in range(LENGTH)]} for _ in range(args.batch)]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    for _ in range(3):
        seconds(NUM_TOKENS)
    times = [(seconds(NUM_TOKENS) - seconds(1)) / (NUM_TOKENS - 1) for _ in range(args.repeat)]
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    proposed = [value for name, value in metrics.items() if name.endswith("spec_decode_num_draft_tokens")]
    accepted = [value for name, value in metrics.items() if name.endswith("spec_decode_num_accepted_tokens")]
    return {
        "ms_per_token": round(1e3 * statistics.median(times), 4),
        "all": [round(1e3 * value, 3) for value in times],
        "proposed": proposed[:1],
        "accepted": accepted[:1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--method", default="mtp")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--not-adaptive", action="store_true")
    parser.add_argument("--one", action="store_true", help="measure in this process: one number of drafts")
    args = parser.parse_args()
    for num_drafts in args.drafts:
        for acceptance in args.acceptance if num_drafts else [0.0]:
            head = {"drafts": num_drafts, "acceptance": acceptance, "batch": args.batch}
            if args.one:
                print("RESULT", json.dumps({**head, **measure(args, num_drafts, acceptance)}), flush=True)
                continue
            command = [sys.executable, __file__, args.model, "--one", "--method", args.method]
            command += ["--drafts", str(num_drafts), "--acceptance", str(acceptance), "--batch", str(args.batch)]
            command += ["--repeat", str(args.repeat), *(["--not-adaptive"] if args.not_adaptive else [])]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()

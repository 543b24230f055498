"""The engine's own numbers, in one line."""

from __future__ import annotations

from collections.abc import Sequence

from fleetfoot.records.outputs import RequestMetrics
from fleetfoot.scheduler.stats import DraftStats


def numbers_line(metrics: Sequence[RequestMetrics], duration_s: float) -> str:
    """``TTFT 12.1 ms, TPOT 3.2 ms, 312.5 tokens/s``; means, where there are several requests.

    Args:
        metrics: of the finished requests.
        duration_s: from the first request's arrival to the last token.
    """
    ttft = [request.first_token_latency for request in metrics if request.first_token_ts]
    tpot = [request.time_per_output_token for request in metrics if request.num_generation_tokens > 1]
    num_tokens = sum(request.num_generation_tokens for request in metrics)
    parts = [
        f"{name}{' (mean)' if len(values) > 1 else ''} {sum(values) / len(values) * 1e3:.1f} ms"
        for name, values in (("TTFT", ttft), ("TPOT", tpot))
        if values
    ]
    if duration_s > 0:
        parts.append(f"{num_tokens / duration_s:.1f} tokens/s")
    return ", ".join(parts)


def drafts_line(drafts: DraftStats) -> str:
    """``drafts: 3.42 tokens a step, 81% of 1200 accepted``, and how many steps went without drafts, and why."""
    if drafts.num_rows:
        text = (
            f"drafts: {drafts.mean_acceptance_length:.2f} tokens a step, {100 * drafts.acceptance_rate:.0f}% of "
            f"{drafts.num_drafted} accepted"
        )
    else:
        text = "drafts: none were verified"
    off = "".join(f"; none in {count(steps, 'step')}: {reason}" for reason, steps in drafts.off.items())
    return text + off


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"

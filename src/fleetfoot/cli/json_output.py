"""Outputs as JSON, for programs. The fields are described in `fleetfoot generate --help`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fleetfoot.records.logprobs import Logprob
from fleetfoot.records.outputs import CompletionOutput, RequestMetrics, RequestOutput


def dump_object(value: dict[str, Any]) -> str:
    """Indented, for people to read too; plain ASCII, which any terminal and any pipe takes; NaN is an error."""
    return json.dumps(value, indent=2, allow_nan=False)


def dump_array(values: Sequence[dict[str, Any]]) -> str:
    """The same with an entry on each line: indented, token ids would fill a screen each."""
    return "[\n" + ",\n".join(json.dumps(value, allow_nan=False) for value in values) + "\n]"


def request_json(output: RequestOutput) -> dict[str, Any]:
    """One request; ``prompt_logprobs`` is there if they were asked for."""
    content: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_completion_json(completion) for completion in output.outputs],
        "metrics": _metrics_json(output),
    }
    if output.prompt_logprobs is not None:
        content["prompt_logprobs"] = [_logprobs_json(entry) for entry in output.prompt_logprobs]
    return content


def _completion_json(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": None if logprobs is None else [_logprobs_json(entry) for entry in logprobs],
        "cumulative_logprob": _finite(completion.cumulative_logprob),
    }


def _logprobs_json(entry: dict[int, Logprob] | None) -> dict[str, Any] | None:
    if entry is None:  # the first token of a prompt, which nothing predicts
        return None
    return {
        str(token_id): {"logprob": _finite(chance.logprob), "rank": chance.rank, "decoded_token": chance.decoded_token}
        for token_id, chance in entry.items()
    }


def _metrics_json(output: RequestOutput) -> dict[str, Any]:
    metrics: RequestMetrics = output.metrics
    has_token = metrics.first_token_ts > 0
    latency_s = metrics.last_token_ts - metrics.queued_ts if has_token else None
    return {
        "arrival_time": metrics.arrival_time,
        "ttft_ms": metrics.first_token_latency * 1e3 if has_token else None,
        "tpot_ms": metrics.time_per_output_token * 1e3 if metrics.num_generation_tokens > 1 else None,
        "latency_ms": latency_s * 1e3 if latency_s is not None else None,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_generation_tokens": metrics.num_generation_tokens,
        "num_drafted_tokens": metrics.num_drafted_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
    }


def _finite(number: float | None) -> float | None:
    """JSON has neither NaN nor infinity: null says that there is no such number."""
    return number if number is not None and math.isfinite(number) else None

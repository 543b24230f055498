"""Results as JSON for programs and as text for terminals. `fleetfoot generate --help` describes the JSON fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from fleetfoot.config import env
from fleetfoot.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from fleetfoot.scheduler.stats import DraftStats

# --- JSON -------------------------------------------------------------------------------------------------------------


def dump_object(value: dict[str, Any]) -> str:
    """Indented ASCII JSON. NaN and infinity raise ValueError."""
    return json.dumps(value, indent=2, allow_nan=False)


def dump_array(values: Sequence[dict[str, Any]]) -> str:
    """ASCII JSON with one entry per line: with indentation, each token id would take a line."""
    return "[\n" + ",\n".join(json.dumps(value, allow_nan=False) for value in values) + "\n]"


def request_json(output: RequestOutput) -> dict[str, Any]:
    """One request; has ``prompt_logprobs`` if they were requested."""
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
    if entry is None:  # the first token of a prompt
        return None
    return {
        str(token_id): {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
        for token_id, item in entry.items()
    }


def _metrics_json(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    has_token = metrics.first_token_ts > 0
    return {
        "arrival_time": metrics.arrival_time,
        "ttft_ms": metrics.first_token_latency * 1e3 if has_token else None,
        "tpot_ms": metrics.time_per_output_token * 1e3 if metrics.num_generation_tokens > 1 else None,
        "latency_ms": (metrics.last_token_ts - metrics.queued_ts) * 1e3 if has_token else None,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_generation_tokens": metrics.num_generation_tokens,
        "num_drafted_tokens": metrics.num_drafted_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
    }


def _finite(number: float | None) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    return number if number is not None and math.isfinite(number) else None


# --- lines ------------------------------------------------------------------------------------------------------------


def numbers_line(metrics: Sequence[RequestMetrics], duration_s: float) -> str:
    """``TTFT 12.1 ms, TPOT 3.2 ms, 312.5 tokens/s``; means over several requests.

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
    """``drafts: 3.42 tokens a step, 81% of 1200 accepted``; then the number of steps without drafts, by reason."""
    if drafts.num_rows:
        text = (
            f"drafts: {drafts.mean_acceptance_length:.2f} tokens a step, {100 * drafts.acceptance_rate:.0f}% of "
            f"{drafts.num_drafted} accepted"
        )
    else:
        text = "drafts: none were verified"
    return text + steps_without_drafts(drafts.off)


def steps_without_drafts(off: dict[str, int]) -> str:
    """``; none in 2 steps: REASON`` for each reason."""
    return "".join(f"; none in {count(steps, 'step')}: {reason}" for reason, steps in off.items())


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def readable(num_bytes: int) -> str:
    """``79.25 GiB``, ``512.0 MiB``, ``12 B``."""
    size = float(num_bytes)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if abs(size) < 1024:
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


# --- streams of text --------------------------------------------------------------------------------------------------

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


class TextPrinter:
    """Prints sequences in the order of the requests, whatever the order in which their outputs arrive.

    The current sequence is printed as its text is generated. Text of later ones is buffered until they are current.

    Args:
        file: where to print.
        request_ids: of all requests, in order.
        num_copies: sequences of each request.
        show_prompt: the text of a request's prompt.
        show_tokens: the text of tokens if the engine does not detokenize, else None.
    """

    def __init__(
        self,
        file: TextIO,
        request_ids: list[str],
        num_copies: int,
        show_prompt: Callable[[RequestOutput], str],
        show_tokens: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._file = file
        self._order = [(request_id, index) for request_id in request_ids for index in range(num_copies)]
        self._num_requests, self._num_copies = len(request_ids), num_copies
        self._show_prompt, self._show_tokens = show_prompt, show_tokens
        self._buffers: dict[tuple[str, int], list[str]] = {key: [] for key in self._order}
        self._prompts: dict[str, str] = {}
        self._ended: set[tuple[str, int]] = set()
        self._current = 0
        self._is_open = False  # whether the current sequence's prompt is printed
        self._bold = (BOLD, PLAIN) if file.isatty() and not env.no_color() else ("", "")

    def add(self, output: RequestOutput) -> None:
        """Print what can be printed.

        Args:
            output: a delta, or a request's only output.
        """
        if output.request_id not in self._prompts:
            self._prompts[output.request_id] = self._show_prompt(output)
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            if key not in self._ended:
                self._buffers[key].append(self._text(completion))
                if completion.finished():
                    self._ended.add(key)
        self._print()

    def _text(self, completion: CompletionOutput) -> str:
        return completion.text if self._show_tokens is None else self._show_tokens(completion.token_ids)

    def _print(self) -> None:
        while self._current < len(self._order):
            key = self._order[self._current]
            if key[0] not in self._prompts:
                break
            if not self._is_open:
                self._begin(key[0])
            self._file.write("".join(self._buffers[key]))
            self._buffers[key].clear()
            if key not in self._ended:
                break
            self._file.write("\n")
            self._current += 1
            self._is_open = False
        self._file.flush()

    def _begin(self, request_id: str) -> None:
        self._is_open = True
        if len(self._order) > 1:
            request, copy = divmod(self._current, self._num_copies)
            places = [f"prompt {request + 1} of {self._num_requests}"] if self._num_requests > 1 else []
            places += [f"output {copy + 1} of {self._num_copies}"] if self._num_copies > 1 else []
            self._file.write("\n" * bool(self._current) + f"--- {', '.join(places)} ---\n")
        bold, plain = self._bold
        self._file.write(f"{bold}{self._prompts[request_id]}{plain}")

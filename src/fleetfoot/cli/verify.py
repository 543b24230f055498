"""`fleetfoot verify`: runs the same requests through both model runners and compares tokens and logprobs."""

from __future__ import annotations

import argparse
import gc
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import add_engine_arguments, add_model_argument, given_settings
from fleetfoot.cli.command import Command, UsageError, started_engine, usage_errors
from fleetfoot.cli.output import count, dump_object
from fleetfoot.cli.prompts import read_prompts_file
from fleetfoot.config.engine import EMBEDDED_MODEL
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import Logprob, RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine

DEFAULT_MAX_TOKENS = 32
NUM_LOGPROBS = 20
"""Logprobs are compared for this many most probable tokens of each position."""
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 40, 64, 100)
"""Of the default prompts, in tokens: ragged, at block boundaries, and over several blocks."""
SHARED_PREFIX = 32
"""Common prefix of the last two default prompts in tokens, for prefix cache hits."""

_RUNNER_FLAGS = ("runner", "use_v2_model_runner")
_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 1},
    "filtered": {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 2},
    "penalized": {"temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
                  "seed": 3},
}  # fmt: skip
"""Each prompt is run with each of these."""

_EPILOG = """\
Each prompt is run greedily, with a seed, with a seed and filters, and with a seed and penalties, all in one batch,
first through Model Runner V1 and then through V2. The default prompts are random token ids: no tokenizer is needed.

Compared are all tokens, and the logprobs of the 20 most probable tokens of each position of prompt and output, up to
the first token that differs. Logprobs are the logits less a constant of their position, before any sampling parameter.
In float32 all tokens must be equal. In bfloat16 they part where the two most probable tokens are nearly equal: the gap
between their logprobs is reported, and tells a rounding error from a wrong result.

--json prints one object:
  equal; model, device, dtype, runners (as the engines report them), num_prompts, num_requests, max_tokens
  requests: prompt (its number, from 0), num_prompt_tokens, sampling
  num_equal_tokens; first_difference and differences: request (number, from 0), position (in the output, from 0),
    v1_token, v2_token, v1_gap, v2_gap (most probable logprob less the second), error
  num_logprobs (compared); largest_logprob_difference: difference (V2's less V1's; null: not finite), request,
    position (in prompt and output together), token
The exit code is 0 if all tokens are equal, 1 if some differ, 2 if the command was wrong."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Results of one runner."""

    runner: str
    """Name that the engine reports."""
    device: str
    dtype: str
    outputs: list[RequestOutput]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="prompts to run instead, as for `fleetfoot generate`; - is standard input",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"tokens to generate for each request (default: {DEFAULT_MAX_TOKENS})",
    )
    add_engine_arguments(parser, leave_out=("model", *_RUNNER_FLAGS))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens is {arguments.max_tokens}; it must be at least 1")
    prompts = None if arguments.prompts_file is None else read_prompts_file(arguments.prompts_file)
    v1 = _run_all(arguments, prompts, use_v2=False)
    v2 = _run_all(arguments, prompts, use_v2=True)
    comparison = compare(v1.outputs, v2.outputs)
    report = _report(arguments, v1, v2, comparison)
    print(dump_object(report) if arguments.json else _text(report))
    return 0 if report["equal"] else 1


def _run_all(arguments: argparse.Namespace, prompts: list[PromptType] | None, *, use_v2: bool) -> _Run:
    has_text = any(isinstance(prompt, str) or "prompt_token_ids" not in prompt for prompt in prompts or ())
    with started_engine(arguments, use_v2_model_runner=use_v2, skip_tokenizer_init=not has_text) as (engine, _):
        if prompts is None:
            prompts = default_prompts(engine, arguments.max_tokens)
        outputs = _generate(engine, prompts, arguments.max_tokens)
        run = _Run(engine.runner_name, engine.plan.device, engine.plan.dtype, outputs)
    _release_memory(run.device)
    return run


def default_prompts(engine: LLMEngine, max_tokens: int) -> list[PromptType]:
    """Random token ids, the same in each run; truncated to leave room for the output."""
    source = random.Random(0)
    longest = engine.max_request_len - max_tokens
    if longest < 1:
        raise UsageError(
            f"--max-tokens is {max_tokens}, which leaves no room for a prompt: a request can have "
            f"{engine.max_request_len} tokens in all"
        )
    vocab_size = engine.input_processor.vocab_size
    prompts = [[source.randrange(vocab_size) for _ in range(min(length, longest))] for length in PROMPT_LENGTHS]
    prompts[-1][:SHARED_PREFIX] = prompts[-2][:SHARED_PREFIX][: len(prompts[-1])]
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def _generate(engine: LLMEngine, prompts: list[PromptType], max_tokens: int) -> list[RequestOutput]:
    """The last output of each request: for each prompt, one for each entry of `_SAMPLING`."""
    limits = engine.input_processor
    max_logprobs = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    num_logprobs = min(NUM_LOGPROBS, limits.vocab_size, max_logprobs)
    with usage_errors():
        for number, prompt in enumerate(prompts):
            for name, sampling in _SAMPLING.items():
                params = SamplingParams(
                    **sampling,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    logprobs=num_logprobs,
                    # prompt logprobs bypass the prefix cache, so only one of the requests has them
                    prompt_logprobs=num_logprobs if name == "greedy" else None,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(f"{number} {name}", prompt, params)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return [finished[f"{number} {name}"] for number in range(len(prompts)) for name in _SAMPLING]


def _release_memory(device: str) -> None:
    """Free the first engine's memory before the second sizes its KV cache."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def _report(arguments: argparse.Namespace, v1: _Run, v2: _Run, comparison: Comparison) -> dict[str, Any]:
    names = list(_SAMPLING)
    return {
        **comparison.as_json(),
        "model": given_settings(arguments).get("model", EMBEDDED_MODEL),
        "device": v2.device,
        "dtype": v2.dtype,
        "runners": [v1.runner, v2.runner],
        "num_prompts": len(v1.outputs) // len(names),
        "num_requests": len(v1.outputs),
        "max_tokens": arguments.max_tokens,
        "requests": [
            {
                "prompt": number // len(names),
                "num_prompt_tokens": len(output.prompt_token_ids),
                "sampling": names[number % len(names)],
            }
            for number, output in enumerate(v1.outputs)
        ],
    }


def _text(report: dict[str, Any]) -> str:
    first, largest, requests = report["first_difference"], report["largest_logprob_difference"], report["requests"]
    what = f"{count(report['num_requests'], 'request')} on {report['device']} in {report['dtype']}"
    if first is None:
        lines = [f"{what}: all {report['num_equal_tokens']:,} tokens are equal."]
    else:
        lines = [
            f"{what}: {len(report['differences'])} of them differ ({report['num_equal_tokens']:,} tokens are equal).",
            f"first: request {first['request']} ({_describe(requests[first['request']])}), output token "
            f"{first['position']}: V1 {_token(first['v1_token'])}, V2 {_token(first['v2_token'])}",
            f"       the two most probable logprobs are apart by {_number(first['v1_gap'])} in V1, "
            f"{_number(first['v2_gap'])} in V2",
        ]
        lines += [f"       it ended with an error: {first['error']}"] if first["error"] else []
    if largest is not None:
        lines.append(
            f"largest difference of {report['num_logprobs']:,} logprobs: {_number(largest['difference'])}, token "
            f"{largest['token']} at position {largest['position']} of request {largest['request']} "
            f"({_describe(requests[largest['request']])})"
        )
    return "\n".join(lines)


def _describe(request: dict[str, Any]) -> str:
    return f"prompt {request['prompt']} of {count(request['num_prompt_tokens'], 'token')}, {request['sampling']}"


def _token(token: int | None) -> str:
    return "has ended" if token is None else str(token)


def _number(value: float | None) -> str:
    return "no finite number" if value is None else f"{abs(value):.3g}"


# --- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first output token of a request that differs; both runners saw the same tokens before it."""

    request: int
    position: int
    """In the output, from 0."""
    v1_token: int | None
    """None: the output has ended."""
    v2_token: int | None
    v1_gap: float | None
    """Most probable logprob at the position less the second one."""
    v2_gap: float | None
    error: str | None = None
    """Message of a runner that ended the request with an error."""


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Difference of a logprob that both runners returned."""

    difference: float
    """V2 less V1."""
    request: int
    position: int
    """In prompt and output together, from 0."""
    token: int


@dataclass(slots=True)
class Comparison:
    """Result of comparing two runs."""

    num_tokens: int = 0
    """Output tokens that are equal."""
    num_logprobs: int = 0
    """Logprobs compared."""
    differences: list[TokenDifference] = field(default_factory=list)
    """At most one for each request, in order."""
    largest: LogprobDifference | None = None
    """None if nothing was compared."""

    @property
    def first(self) -> TokenDifference | None:
        """The one with the lowest position in the output; of several, that of the first request."""
        return min(self.differences, key=lambda difference: (difference.position, difference.request), default=None)

    def as_json(self) -> dict[str, Any]:
        largest = None if self.largest is None else asdict(self.largest)
        if largest is not None and not math.isfinite(largest["difference"]):
            largest["difference"] = None
        return {
            "equal": not self.differences,
            "num_equal_tokens": self.num_tokens,
            "first_difference": None if self.first is None else asdict(self.first),
            "differences": [asdict(difference) for difference in self.differences],
            "num_logprobs": self.num_logprobs,
            "largest_logprob_difference": largest,
        }


def compare(v1: Sequence[RequestOutput], v2: Sequence[RequestOutput]) -> Comparison:
    """Compare two runs of the same requests.

    Logprobs are compared for tokens that both runners returned, over the prompt and over the output up to and including
    the first token that differs. After it the runners continue different texts.
    """
    comparison = Comparison()
    for request, (first, second) in enumerate(zip(v1, v2, strict=True)):
        _compare_request(comparison, request, first, second)
    return comparison


def _compare_request(comparison: Comparison, request: int, v1: RequestOutput, v2: RequestOutput) -> None:
    for position, pair in enumerate(zip(v1.prompt_logprobs or (), v2.prompt_logprobs or (), strict=True)):
        _compare_logprobs(comparison, request, position, *pair)
    outputs = v1.outputs[0], v2.outputs[0]
    token_ids = [output.token_ids for output in outputs]
    end = next((i for i, (a, b) in enumerate(zip(*token_ids, strict=False)) if a != b), min(map(len, token_ids)))
    comparison.num_tokens += end
    for position in range(end + 1):
        entries = [_at(output.logprobs, position) for output in outputs]
        _compare_logprobs(comparison, request, len(v1.prompt_token_ids) + position, *entries)
    if end < max(map(len, token_ids)) or outputs[0].finish_reason != outputs[1].finish_reason:
        tokens = [_at(ids, end) for ids in token_ids]
        gaps = [_gap(_at(output.logprobs, end)) for output in outputs]
        errors = [str(output.stop_reason) for output in outputs if output.finish_reason == "error"]
        comparison.differences.append(TokenDifference(request, end, *tokens, *gaps, *errors[:1]))


def _compare_logprobs(
    comparison: Comparison, request: int, position: int, v1: dict[int, Logprob] | None, v2: dict[int, Logprob] | None
) -> None:
    pairs = [(token, before, v2[token]) for token, before in v1.items() if token in v2] if v1 and v2 else []
    for token, before, after in pairs:
        is_equal = before.logprob == after.logprob  # both may be infinite
        difference = 0.0 if is_equal else after.logprob - before.logprob
        comparison.num_logprobs += 1
        if comparison.largest is None or _size(difference) > _size(comparison.largest.difference):
            comparison.largest = LogprobDifference(difference, request, position, token)


def _size(difference: float) -> float:
    """NaN counts as infinite."""
    return math.inf if math.isnan(difference) else abs(difference)


def _gap(entry: dict[int, Logprob] | None) -> float | None:
    if entry is None or len(entry) < 2:
        return None
    best, second, *_ = sorted((item.logprob for item in entry.values()), reverse=True)
    return best - second


def _at(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values is not None and index < len(values) else None


COMMAND = Command(
    "verify", "run the same requests through both model runners and compare", _add_arguments, _run, _EPILOG, "[MODEL] "
)

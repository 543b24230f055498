"""`fleetfoot verify`: the same requests through both model runners, and where they part."""

from __future__ import annotations

import argparse
import gc
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import add_engine_arguments, add_model_argument, given_settings
from fleetfoot.cli.command import Command, UsageError, usage_errors
from fleetfoot.cli.json_output import dump_object
from fleetfoot.cli.numbers import count
from fleetfoot.cli.prompts import read_prompts_file
from fleetfoot.cli.start import StartedEngine, started_engine
from fleetfoot.cli.verify_compare import Comparison, compare
from fleetfoot.config.engine import EMBEDDED_MODEL
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from fleetfoot.records.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 32
NUM_LOGPROBS = 20
"""Most probable tokens of each position whose logprobs are compared."""
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 40, 64, 100)
"""Of the default prompts, in tokens: ragged, at the borders of KV blocks, and over several of them."""
SHARED = 32
"""Tokens that the last two default prompts begin with, so that the prefix cache is met."""

_OWN = ("runner", "use_v2_model_runner")
_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 1},
    "filtered": {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 2},
    "penalized": {"temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
                  "seed": 3},
}  # fmt: skip
"""Ways of sampling, each with each prompt."""

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
    """All requests through one runner."""

    runner: str
    """As the engine reports it."""
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
    add_engine_arguments(parser, leave_out=("model", *_OWN))


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
    with started_engine(arguments, use_v2_model_runner=use_v2, skip_tokenizer_init=not has_text) as started:
        chosen = default_prompts(started, arguments.max_tokens) if prompts is None else prompts
        outputs = _generate(started, chosen, arguments.max_tokens)
        run = _Run(started.engine.runner_name, started.plan.device, started.plan.dtype, outputs)
    _give_memory_back(run.device)
    return run


def default_prompts(started: StartedEngine, max_tokens: int) -> list[PromptType]:
    """Random token ids, the same in each run; cut to what leaves room for the output."""
    source = random.Random(0)
    longest = started.max_tokens_in_all - max_tokens
    if longest < 1:
        raise UsageError(
            f"--max-tokens is {max_tokens}, which leaves no room for a prompt: a request can have "
            f"{started.max_tokens_in_all} tokens in all"
        )
    vocab_size = started.engine.admission.vocab_size
    prompts = [[source.randrange(vocab_size) for _ in range(min(length, longest))] for length in PROMPT_LENGTHS]
    prompts[-1][:SHARED] = prompts[-2][:SHARED][: len(prompts[-1])]
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def _generate(started: StartedEngine, prompts: list[PromptType], max_tokens: int) -> list[RequestOutput]:
    """The last output of each request: prompt by prompt, and for each prompt one for each entry of _SAMPLING."""
    engine, admission = started.engine, started.engine.admission
    limit = admission.vocab_size if admission.max_logprobs == -1 else min(admission.vocab_size, admission.max_logprobs)
    wanted = min(NUM_LOGPROBS, limit)
    with usage_errors():
        for number, prompt in enumerate(prompts):
            for name, chosen in _SAMPLING.items():
                params = SamplingParams(
                    **chosen,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    logprobs=wanted,
                    # whoever asks for these computes the whole prompt: the others meet the prefix cache
                    prompt_logprobs=wanted if name == "greedy" else None,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(f"{number} {name}", prompt, params)
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return [finished[f"{number} {name}"] for number in range(len(prompts)) for name in _SAMPLING]


def _give_memory_back(device: str) -> None:
    """What the first engine held must be free before the second sizes its KV cache."""
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


COMMAND = Command(
    "verify", "run the same requests through both model runners and compare", _add_arguments, _run, _EPILOG, "[MODEL] "
)

"""`fleetfoot verify`: runs the same requests through both model runners and on other paths of the engine, and compares
tokens and logprobs."""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.against import run_against
from fleetfoot.cli.arguments import add_engine_arguments, engine_config, given_settings, with_settings
from fleetfoot.cli.command import (
    Command,
    UsageError,
    count,
    dump_object,
    read_prompts_file,
    started_engine,
    usage_errors,
)
from fleetfoot.config.engine import EMBEDDED_MODEL
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import CompletionOutput, Logprob, RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.progress import progress_bar

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine

DEFAULT_MAX_TOKENS = 32
NUM_LOGPROBS = 20
"""Logprobs are compared for this many most probable tokens of each position."""
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 40, 64, 100)
"""Lengths of the default prompts, in tokens: ragged, at block boundaries, and over several blocks."""
SHARED_PREFIX = 32
"""Common prefix of the last two default prompts in tokens, for prefix cache hits."""

_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 1},
    "filtered": {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 2},
    "penalized": {"temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
                  "seed": 3},
}  # fmt: skip
"""Each prompt is run with each of these."""

_TOLERANCES = {"float32": 1e-3, "float16": 0.2, "bfloat16": 1.0}
"""Differences of a logprob that rounding explains are at most so large."""

_EPILOG = """\
Each prompt is run greedily, with a seed, with a seed and filters, and with a seed and penalties, all in one batch,
first through Model Runner V1 and then through V2. The default prompts are random token ids: no tokenizer is needed.

Compared are all tokens, and the logprobs of the 20 most probable tokens of each position of prompt and output, up to
the first token that differs. Logprobs are the logits less a constant of their position, before any sampling parameter.
V2 then runs the requests one at a time, with prompts in chunks, with so few KV blocks that requests are preempted, and
on one rank if the settings have more. In a 16-bit dtype, a model with the same weights in float32 reads the greedy
outputs, and tokens that are not its most probable ones are counted.

On a CPU with linear layers in C, all paths have the same bits. Elsewhere, outputs may part where the two most probable
tokens are nearly equal: in float32 hardly ever, in bfloat16 and float16 in some outputs of a hundred. A difference is
wrong, and no rounding, if a greedy token is not the most probable one of its own logits, if the logprobs of both paths
are the same, or if they are apart by more than 0.001 in float32, 0.2 in float16, 1 in bfloat16.

--against MODEL reports what quantization does: for each position of texts, the divergence of Kullback and Leibler of
the next token's distribution from that of the other model, which writes the texts (from the prompts, if there are
any); and how often the most probable token is the same. With it, --json prints one object: against, num_texts,
num_positions, mean_kl, median_kl, p99_kl, largest_kl (in nats), top1_agreement, layers (with --by-layer: norm of the
difference of each layer's outputs, relative), kl_by_share (the divergence that 0, 1, ... 100% of the positions are
below). The exit code is 0.

--json prints one object:
  equal (of the runners); model, device, dtype, runners (as the engines report them), num_prompts, num_requests,
    max_tokens
  requests: prompt (its number, from 0), num_prompt_tokens, sampling
  num_wrong_greedy (tokens of the runners that are not the most probable ones of their own logits)
  num_equal_tokens; first_difference and differences: request (number, from 0), position (in the output, from 0),
    v1_token, v2_token, v1_gap, v2_gap (most probable logprob less the second), error
  num_logprobs (compared); largest_logprob_difference: difference (V2's less V1's; null: not finite), request,
    position (in prompt and output together), token
  paths: name -> num_different and share (outputs that differ from those of V2's batch), num_wrong (of these),
    largest_gap (of the two most probable logprobs at a first difference of greedy outputs; null: none), or error
  float32: null in float32, else num_tokens (greedy ones), num_different and share (not the most probable in float32),
    num_wrong (of these: by more than twice the tolerance), largest_gap (float32's most probable logprob less
    that of the token), or error
The exit code is 0 if both runners have equal tokens and nothing is wrong, 1 if not, 2 if the command was wrong."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    prompts_help = "prompts to run instead, as for `fleetfoot generate`; - is standard input"
    parser.add_argument("--prompts-file", metavar="FILE", help=prompts_help)
    tokens_help = f"tokens to generate for each request (default: {DEFAULT_MAX_TOKENS})"
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help=tokens_help)
    against_help = "compare the distributions of next tokens with those of this model, and nothing else"
    parser.add_argument("--against", metavar="MODEL", help=against_help)
    parser.add_argument("--by-layer", action="store_true", help="with --against: the difference of each layer's output")
    parser.add_argument("--plot", metavar="FILE", help="with --against: draw it to an SVG or PNG file")
    runners_help = "leave out the other paths and the comparison with float32, which takes memory for float32 weights"
    parser.add_argument("--runners-only", action="store_true", help=runners_help)
    add_engine_arguments(parser, leave_out=("model_runner", "use_v2_model_runner", "max_logprobs"), takes_model=True)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.against is not None:
        return run_against(arguments)
    if arguments.by_layer or arguments.plot is not None:
        raise UsageError("--by-layer and --plot go with --against MODEL")
    if arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens is {arguments.max_tokens}; it must be at least 1")
    prompts = None if arguments.prompts_file is None else read_prompts_file(arguments.prompts_file)
    (v1_runner, *_), v1 = _run_all(arguments, prompts, use_v2_model_runner=False)
    (v2_runner, device, dtype), v2 = _run_all(arguments, prompts, use_v2_model_runner=True)
    names, size = list(_SAMPLING), len(_SAMPLING)
    others: dict[str, Any] = {} if arguments.runners_only else {
        "paths": {name: _compare_path(arguments, v2, other, dtype) for name, other in _paths(arguments, v2).items()},
        "float32": None if dtype == "float32" else _compare_float32(arguments, v2[::size], dtype),
    }  # fmt: skip
    report = compare(v1, v2) | others | {
        "num_wrong_greedy": sum(map(_num_wrong_greedy, [*v1[::size], *v2[::size]])),
        "model": given_settings(arguments).get("model", EMBEDDED_MODEL), "device": device, "dtype": dtype,
        "runners": [v1_runner, v2_runner], "num_prompts": len(v1) // size, "num_requests": len(v1),
        "max_tokens": arguments.max_tokens,
        "requests": [
            {"prompt": n // size, "num_prompt_tokens": len(run.prompt_token_ids), "sampling": names[n % size]}
            for n, run in enumerate(v1)
        ],
    }  # fmt: skip
    print(dump_object(report) if arguments.json else _text(report))
    parts = [*others.get("paths", {}).values(), others.get("float32") or {}]
    is_wrong = report["num_wrong_greedy"] or any(part.get("num_wrong") for part in parts)
    return 0 if report["equal"] and not is_wrong else 1


def _paths(arguments: argparse.Namespace, v2: list[RequestOutput]) -> dict[str, dict[str, Any]]:
    """Settings with which V2 takes another path to the same tokens."""
    config = engine_config(arguments)
    longest = max((len(output.prompt_token_ids) for output in v2), default=0) + arguments.max_tokens
    paths: dict[str, dict[str, Any]] = {
        "one request at a time": {"max_num_seqs": 1},
        "prompts in chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 32, "enable_chunked_prefill": True},
        "preempted": {"max_model_len": longest, "num_gpu_blocks_override": longest // config.block_size + 2},
    }
    if config.world_size > 1:
        sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1)
        off = {"enable_expert_parallel": False, "enable_eplb": False, "eplb_config": None}
        paths["one rank"] = {**sizes, **off}
    return paths


def _compare_path(
    arguments: argparse.Namespace, v2: list[RequestOutput], settings: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """How the outputs differ from V2's with other settings."""
    prompts: list[PromptType] = [{"prompt_token_ids": output.prompt_token_ids} for output in v2[:: len(_SAMPLING)]]
    try:
        _, outputs = _run_all(with_settings(arguments, **settings), prompts, use_v2_model_runner=True)
    except UsageError as error:
        return {"error": str(error)}
    differences, pairs = compare(v2, outputs)["differences"], list(zip(v2, outputs, strict=True))
    wrong = [entry for entry in differences if not _is_rounding(pairs[entry["request"]], entry, _TOLERANCES[dtype])]
    greedy = [entry for entry in differences if entry["request"] % len(_SAMPLING) == 0]
    gaps = [entry[name] for entry in greedy for name in ("v1_gap", "v2_gap")]
    return _summary(len(v2), len(differences), len(wrong), gaps)


def _is_rounding(runs: Sequence[RequestOutput], difference: dict[str, Any], tolerance: float) -> bool:
    """Whether outputs may part there because logits were summed in another order."""
    is_greedy, position = difference["request"] % len(_SAMPLING) == 0, difference["position"]
    if difference["error"] or (is_greedy and any(map(_num_wrong_greedy, runs))):
        return False
    before, after = (_at(run.outputs[0].logprobs, position) for run in runs)
    sizes = [_size(entry) for entry in _logprob_differences(before, after, 0, position)]
    return 0 < max(sizes, default=math.inf) <= tolerance


def _num_wrong_greedy(output: RequestOutput) -> int:
    """Tokens that are not the most probable ones of their own logits."""
    run = output.outputs[0]
    return sum(_behind(*pair) != 0 for pair in zip(run.token_ids, run.logprobs or (), strict=False))


def _behind(token: int, entry: dict[int, Logprob] | None) -> float | None:
    """The most probable logprob less that of the token; None: the entry lacks the token."""
    if entry is None or token not in entry:
        return None
    return max(item.logprob for item in entry.values()) - entry[token].logprob


def _compare_float32(arguments: argparse.Namespace, greedy: list[RequestOutput], dtype: str) -> dict[str, Any]:
    """How many greedy tokens are not the argmax of the same weights' logits in float32, for the same tokens before."""
    texts = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in greedy]
    prompts: list[PromptType] = [{"prompt_token_ids": [*prompt, *tokens[:-1]]} for prompt, tokens in texts]
    settings = with_settings(arguments, dtype="float32")
    try:
        _, outputs = _run_all(settings, prompts, ("greedy",), 1, use_v2_model_runner=False)
    except UsageError as error:
        return {"error": str(error)}
    num_tokens, gaps = 0, []
    for (prompt, tokens), output in zip(texts, outputs, strict=True):
        for token, entry in zip(tokens, _logprobs(output, 0)[len(prompt) :], strict=True):
            num_tokens += 1
            gaps += [gap] if (gap := _behind(token, entry)) != 0 else []
    num_wrong = sum(gap is None or gap > 2 * _TOLERANCES[dtype] for gap in gaps)  # the errors of two logprobs
    return {"num_tokens": num_tokens} | _summary(num_tokens, len(gaps), num_wrong, gaps)


def _summary(total: int, num_different: int, num_wrong: int, gaps: Sequence[float | None]) -> dict[str, Any]:
    counts = {"num_different": num_different, "share": num_different / max(total, 1), "num_wrong": num_wrong}
    return counts | {"largest_gap": max((gap for gap in gaps if gap is not None), default=None)}


def _run_all(
    arguments: argparse.Namespace,
    prompts: list[PromptType] | None,
    names: Sequence[str] = tuple(_SAMPLING),
    max_tokens: int | None = None,
    **settings: Any,
) -> tuple[tuple[str, str, str], list[RequestOutput]]:
    """The runner that the engine reports, its device and dtype; and the outputs."""
    max_tokens = max_tokens or arguments.max_tokens
    has_text = any(isinstance(prompt, str) or "prompt_token_ids" not in prompt for prompt in prompts or ())
    with started_engine(arguments, skip_tokenizer_init=not has_text, **settings) as (engine, _):
        if prompts is None:
            prompts = _default_prompts(engine, max_tokens)
        outputs = _generate(engine, prompts, names, max_tokens)
        facts = engine.runner_name, engine.plan.device, engine.plan.dtype
    del engine
    gc.collect()  # frees the engine's memory before the next one sizes its KV cache
    if facts[1] == "cuda":
        import torch

        torch.cuda.empty_cache()
    return facts, outputs


def _default_prompts(engine: LLMEngine, max_tokens: int) -> list[PromptType]:
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


def _generate(
    engine: LLMEngine, prompts: list[PromptType], names: Sequence[str], max_tokens: int
) -> list[RequestOutput]:
    """The last output of each request: for each prompt, one for each of ``names`` in `_SAMPLING`."""
    num_logprobs = min(NUM_LOGPROBS, engine.input_processor.vocab_size)
    with usage_errors():
        for number, prompt in enumerate(prompts):
            for name in names:
                params = SamplingParams(
                    **_SAMPLING[name], max_tokens=max_tokens, ignore_eos=True, logprobs=num_logprobs, detokenize=False,
                    # prompt logprobs bypass the prefix cache, so only one of the requests has them
                    prompt_logprobs=num_logprobs if name == "greedy" else None,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )  # fmt: skip
                engine.add_request(f"{number} {name}", prompt, params)
    finished: dict[str, RequestOutput] = {}
    total, title = len(prompts) * len(names), f"Model Runner {engine.runner_name.upper()}"
    with progress_bar(sys.stderr.isatty(), total=total, description=title) as advance:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output
                    advance(output.metrics.num_generation_tokens)
    return [finished[f"{number} {name}"] for number in range(len(prompts)) for name in names]


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
    if largest is not None and largest["difference"] == 0:
        lines.append(f"all {report['num_logprobs']:,} logprobs are equal")
    elif largest is not None:
        lines.append(
            f"largest difference of {report['num_logprobs']:,} logprobs: {_number(largest['difference'])}, token "
            f"{largest['token']} at position {largest['position']} of request {largest['request']} "
            f"({_describe(requests[largest['request']])})"
        )
    if report["num_wrong_greedy"]:
        lines.append(f"WRONG: {report['num_wrong_greedy']} greedy tokens are not the most probable of their logits")
    for name, path in report.get("paths", {}).items():
        lines.append(f"{name}: " + _share(path, count(report["num_requests"], "output"), "differ"))
    if report.get("float32"):
        what = count(report["float32"].get("num_tokens", 0), "greedy token")
        lines.append("float32, same weights: " + _share(report["float32"], what, "are not its most probable ones"))
    return "\n".join(lines)


def _share(part: dict[str, Any], total: str, what: str) -> str:
    if "error" in part:
        return f"not compared: {part['error']}"
    largest, wrong = part["largest_gap"], part["num_wrong"]
    gap = "" if largest is None else f"; largest gap of their logprobs: {_number(largest)}"
    wrong = f"; WRONG: {wrong} of them by more than rounding" if wrong else ""
    return f"{part['num_different']} of {total} ({part['share']:.1%}) {what}{gap}{wrong}"


def _describe(request: dict[str, Any]) -> str:
    return f"prompt {request['prompt']} of {count(request['num_prompt_tokens'], 'token')}, {request['sampling']}"


def _token(token: int | None) -> str:
    return "has ended" if token is None else str(token)


def _number(value: float | None) -> str:
    return "no finite number" if value is None else f"{abs(value):.3g}"


# --- comparison -------------------------------------------------------------------------------------------------------


def compare(v1: Sequence[RequestOutput], v2: Sequence[RequestOutput]) -> dict[str, Any]:
    """Compare two runs of the same requests. `fleetfoot verify --help` describes the fields of the result.

    Logprobs are compared for tokens that both runners returned, over the prompt and over the output up to and including
    the first token that differs. After it the runners continue different texts.
    """
    num_equal = num_logprobs = 0
    differences: list[dict[str, Any]] = []
    largest: dict[str, Any] | None = None
    for request, runs in enumerate(zip(v1, v2, strict=True)):
        first, second = (run.outputs[0] for run in runs)
        tokens = enumerate(zip_longest(first.token_ids, second.token_ids))
        end = next((position for position, (a, b) in tokens if a != b), len(first.token_ids))
        num_equal += end
        if first.token_ids != second.token_ids or first.finish_reason != second.finish_reason:
            differences.append({"request": request, "position": end, **_difference(first, second, end)})
        pairs = zip(_logprobs(runs[0], end), _logprobs(runs[1], end), strict=False)
        for position, (before, after) in enumerate(pairs):
            for entry in _logprob_differences(before, after, request, position):
                num_logprobs += 1
                largest = entry if largest is None or _size(entry) > _size(largest) else largest
    if largest is not None and not math.isfinite(largest["difference"]):
        largest["difference"] = None
    return {
        "equal": not differences,
        "num_equal_tokens": num_equal,
        "first_difference": min(differences, key=itemgetter("position", "request"), default=None),
        "differences": differences,
        "num_logprobs": num_logprobs,
        "largest_logprob_difference": largest,
    }


def _difference(v1: CompletionOutput, v2: CompletionOutput, position: int) -> dict[str, Any]:
    """What the runners have at the first position that differs."""
    errors = [str(output.stop_reason) for output in (v1, v2) if output.finish_reason == "error"]
    return {
        "v1_token": _at(v1.token_ids, position), "v1_gap": _gap(_at(v1.logprobs, position)),
        "v2_token": _at(v2.token_ids, position), "v2_gap": _gap(_at(v2.logprobs, position)),
        "error": errors[0] if errors else None,
    }  # fmt: skip


def _logprobs(run: RequestOutput, end: int) -> list[dict[int, Logprob] | None]:
    """The logprobs of each position of the prompt, and of the output up to ``end``."""
    return [*(run.prompt_logprobs or [None] * len(run.prompt_token_ids)), *(run.outputs[0].logprobs or ())[: end + 1]]


def _logprob_differences(
    v1: dict[int, Logprob] | None, v2: dict[int, Logprob] | None, request: int, position: int
) -> Iterator[dict[str, Any]]:
    """The differences of the logprobs of each token that both have."""
    for token, before in (v1 or {}).items():
        if v2 is not None and (after := v2.get(token)) is not None:
            is_equal = before.logprob == after.logprob  # both may be infinite
            difference = 0.0 if is_equal else after.logprob - before.logprob
            yield {"difference": difference, "request": request, "position": position, "token": token}


def _size(entry: dict[str, Any]) -> float:
    """The size of a difference; NaN counts as infinite."""
    return math.inf if math.isnan(entry["difference"]) else abs(entry["difference"])


def _gap(entry: dict[int, Logprob] | None) -> float | None:
    """Most probable logprob less the second one."""
    if entry is None or len(entry) < 2:
        return None
    best, second, *_ = sorted((item.logprob for item in entry.values()), reverse=True)
    return best - second


def _at(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values is not None and index < len(values) else None


_HELP = "run the same requests through both model runners and on other paths, and compare"
COMMAND = Command("verify", _HELP, _add_arguments, _run, _EPILOG, "[MODEL] ")

"""`fleetfoot generate`: continues prompts."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from fleetfoot.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    check_sampling_arguments,
    sampling_params,
)
from fleetfoot.cli.command import Command, UsageError, started_engine, usage_errors
from fleetfoot.cli.output import TextPrinter, count, drafts_line, dump_array, numbers_line, request_json
from fleetfoot.cli.prompts import read_prompts
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.progress import progress_bar

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine

DEFAULT_MAX_TOKENS = 256

_EPILOG = """\
--json prints an array with an object for each prompt:
  prompt, prompt_token_ids
  outputs: index, text, token_ids, finish_reason (stop, length, abort, error), stop_reason, cumulative_logprob,
    logprobs (for each token, an object of token id to {logprob, rank, decoded_token})
  metrics: arrival_time (seconds since 1970), ttft_ms, tpot_ms, latency_ms, num_prompt_tokens, num_cached_tokens,
    num_generation_tokens, num_drafted_tokens, num_accepted_tokens (of speculative decoding)
  prompt_logprobs, with --prompt-logprobs
What was not asked for or does not exist is null."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="what to continue; give it again for more. Without any prompt, standard input is read if it is not a "
        "terminal, and else the opening of a story is continued",
    )
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='a prompt on each line, or {"prompt": ...} or {"prompt_token_ids": [...]} on each line of a .jsonl; '
        "- is standard input",
    )
    parser.add_argument("--stream", action="store_true", help="print text as it is made, one prompt after the other")
    parser.add_argument("--json", action="store_true", help="print one JSON array and nothing else")
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_engine_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.stream and arguments.json:
        raise UsageError("--stream and --json do not go together: JSON is one array, printed at the end; leave one out")
    kind = RequestOutputKind.DELTA if arguments.stream else RequestOutputKind.FINAL_ONLY
    with usage_errors():
        check_sampling_arguments(arguments)
    prompts = read_prompts(arguments.prompt, arguments.prompts_file)
    with started_engine(arguments) as (engine, start_s):
        with usage_errors():
            params = sampling_params(arguments, kind, engine.input_processor.sampling_defaults)
        request_ids = _add_requests(engine, prompts, params)
        printer = _printer(engine, request_ids, params)
        begin = time.perf_counter()
        finished = _generate(engine, request_ids, printer if arguments.stream else None)
        duration_s = time.perf_counter() - begin
        if arguments.json:
            print(dump_array([request_json(output) for output in finished]))
        elif not arguments.stream:
            for output in finished:
                printer.add(output)
        print(_summary(engine, finished, duration_s, start_s), file=sys.stderr)
    return _report_errors(finished)


def _add_requests(engine: LLMEngine, prompts: list[PromptType], params: SamplingParams) -> list[str]:
    """Queue all prompts. A prompt that is refused ends the command before anything is generated."""
    request_ids = [str(number) for number in range(1, len(prompts) + 1)]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        try:
            engine.add_request(request_id, prompt, params)
        except (ValueError, TypeError) as error:
            where = f"prompt {request_id} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise UsageError(f"{where}{error}") from error
    return request_ids


def _generate(engine: LLMEngine, request_ids: list[str], printer: TextPrinter | None) -> list[RequestOutput]:
    """Step until all requests have ended; a printer gets every output.

    Returns:
        The last output of each request, in order.
    """
    finished: dict[str, RequestOutput] = {}
    show_bar = printer is None and sys.stderr.isatty()
    with progress_bar(show_bar, total=len(request_ids), description="Generating") as advance:
        while len(finished) < len(request_ids):
            for output in engine.step():
                if printer is not None:
                    printer.add(output)
                if output.finished:
                    finished[output.request_id] = output
                    advance(output.metrics.num_generation_tokens)
    return [finished[request_id] for request_id in request_ids]


def _printer(engine: LLMEngine, request_ids: list[str], params: SamplingParams) -> TextPrinter:
    tokenizer = engine.tokenizer

    def show_prompt(output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        if tokenizer is not None:
            return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        return " ".join(map(str, output.prompt_token_ids))

    def show_tokens(token_ids: list[int]) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    makes_text = tokenizer is not None and params.detokenize
    return TextPrinter(sys.stdout, request_ids, params.n, show_prompt, None if makes_text else show_tokens)


def _summary(engine: LLMEngine, finished: list[RequestOutput], duration_s: float, start_s: float) -> str:
    metrics = [output.metrics for output in finished]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in finished)
    generated = sum(request.num_generation_tokens for request in metrics)
    has_drafts = engine.plan.config.speculative_config is not None
    drafts = f" | {drafts_line(engine.stats().drafts)}" if has_drafts else ""
    return (
        f"[{count(len(finished), 'prompt')}, {count(prompt_tokens, 'token')} in, {generated} out | "
        f"{numbers_line(metrics, duration_s)}{drafts} | start {start_s:.2f} s | "
        f"{engine.plan.device} {engine.plan.dtype}, runner {engine.runner_name}]"
    )


def _report_errors(finished: list[RequestOutput]) -> int:
    failed = 0
    for number, output in enumerate(finished, start=1):
        for completion in output.outputs:
            if completion.finish_reason == "error":
                failed += 1
                print(
                    f"fleetfoot generate: error: prompt {number}, output {completion.index + 1}: "
                    f"{completion.stop_reason}",
                    file=sys.stderr,
                )
    return 1 if failed else 0


COMMAND = Command("generate", "continue prompts", _add_arguments, _run, _EPILOG)

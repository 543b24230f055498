"""`fleetfoot generate`: continues prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from fleetfoot.cli import arguments as flags
from fleetfoot.cli import command
from fleetfoot.config import env
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.progress import progress_bar

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256
_COMPLETION_KEYS = (*("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs", "cumulative_logprob"),)
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"

_EPILOG = """\
--json prints an array with an object for each prompt:
  prompt, prompt_token_ids
  outputs: index, text, token_ids, finish_reason (stop, length, abort, error), stop_reason, cumulative_logprob,
    logprobs (for each token, an object of token id to {logprob, rank, decoded_token})
  metrics: arrival_time (seconds since 1970), ttft_ms, tpot_ms, latency_ms, num_prompt_tokens, num_cached_tokens,
    num_generation_tokens, num_drafted_tokens, num_accepted_tokens (of speculative decoding)
  prompt_logprobs, with --prompt-logprobs
What was not requested or does not exist is null."""


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
    flags.add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    flags.add_engine_arguments(parser, takes_model=True)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.stream and arguments.json:
        text = "--stream and --json do not go together: JSON is one array, printed at the end; leave one out"
        raise command.UsageError(text)
    kind = RequestOutputKind.DELTA if arguments.stream else RequestOutputKind.FINAL_ONLY
    with command.usage_errors():
        flags.check_sampling_arguments(arguments)
    prompts = command.read_prompts(arguments.prompt, arguments.prompts_file)
    with command.started_engine(arguments) as (engine, start_s):
        with command.usage_errors():
            params = flags.sampling_params(arguments, kind, engine.input_processor.sampling_defaults)
        request_ids = _add_requests(engine, prompts, params)
        has_text = engine.tokenizer is not None and params.detokenize
        printer = TextPrinter(sys.stdout, request_ids, params.n, engine.tokenizer, has_text=has_text)
        begin = time.perf_counter()
        finished = _generate(engine, request_ids, printer if arguments.stream else None)
        duration_s = time.perf_counter() - begin
        if arguments.json:
            print(dump_array([request_json(output) for output in finished]))
        elif not arguments.stream:
            for output in finished:
                printer.add(output)
        command.print_status(_summary(engine, finished, duration_s, start_s))
    return _report_errors(finished)


def _add_requests(engine: LLMEngine, prompts: list[PromptType], params: SamplingParams) -> list[str]:
    """Queue all prompts. A prompt that is refused ends the command before anything is generated."""
    request_ids = [str(number) for number in range(1, len(prompts) + 1)]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        try:
            engine.add_request(request_id, prompt, params)
        except (ValueError, TypeError) as error:
            where = f"prompt {request_id} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise command.UsageError(f"{where}{error}") from error
    return request_ids


def _generate(engine: LLMEngine, request_ids: list[str], printer: TextPrinter | None) -> list[RequestOutput]:
    """Step until all requests have ended; a printer gets every output. Returns the last ones, in order."""
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


def _summary(engine: LLMEngine, finished: list[RequestOutput], duration_s: float, start_s: float) -> str:
    metrics = [output.metrics for output in finished]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in finished)
    generated = sum(request.num_generation_tokens for request in metrics)
    has_drafts = engine.plan.config.speculative_config is not None
    drafts = f" | {command.drafts_line(engine.stats().drafts)}" if has_drafts else ""
    return (
        f"[{command.count(len(finished), 'prompt')}, {command.count(prompt_tokens, 'token')} in, {generated} out | "
        f"{command.numbers_line(metrics, duration_s)}{drafts} | start {start_s:.2f} s | "
        f"{engine.plan.device} {engine.plan.dtype}, runner {engine.runner_name}]"
    )


def _report_errors(finished: list[RequestOutput]) -> int:
    exit_code = 0
    for number, output in enumerate(finished, start=1):
        for completion in output.outputs:
            if completion.finish_reason == "error":
                exit_code = 1
                where = f"prompt {number}, output {completion.index + 1}"
                command.print_status(f"fleetfoot generate: error: {where}: {completion.stop_reason}")
    return exit_code


def dump_array(values: Sequence[dict[str, Any]]) -> str:
    """ASCII JSON with one entry per line: with indentation, each token id would take a line.

    NaN and infinity, which JSON does not have, become null, as msgspec encodes them.
    """
    plain = msgspec.json.decode(msgspec.json.encode(values))
    return "[\n" + ",\n".join(map(json.dumps, plain)) + "\n]"


def request_json(output: RequestOutput) -> dict[str, Any]:
    """One request; has ``prompt_logprobs`` if they were requested."""
    metrics = output.metrics
    has_token = metrics.first_token_ts > 0
    content: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [{name: getattr(completion, name) for name in _COMPLETION_KEYS} for completion in output.outputs],
        "metrics": {
            "arrival_time": metrics.arrival_time,
            "ttft_ms": metrics.first_token_latency * 1e3 if has_token else None,
            "tpot_ms": metrics.time_per_output_token * 1e3 if metrics.num_generation_tokens > 1 else None,
            "latency_ms": (metrics.last_token_ts - metrics.queued_ts) * 1e3 if has_token else None,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "num_generation_tokens": metrics.num_generation_tokens,
            "num_drafted_tokens": metrics.num_drafted_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
        },
    }
    if output.prompt_logprobs is not None:
        content["prompt_logprobs"] = output.prompt_logprobs
    return content


class TextPrinter:
    """Prints sequences in the order of the requests, whatever the order in which their outputs arrive.

    The current sequence is printed as its text is generated. Text of later ones is buffered until they are current.

    Args:
        file: where to print.
        request_ids: of all requests, in order.
        num_copies: sequences of each request.
        tokenizer: for prompts of token ids alone; None: they are shown as numbers.
        has_text: whether outputs have text, else token ids are shown.
    """

    def __init__(
        self,
        file: TextIO,
        request_ids: list[str],
        num_copies: int,
        tokenizer: Tokenizer | None = None,
        *,
        has_text: bool = True,
    ) -> None:
        self._file, self._tokenizer, self._has_text = file, tokenizer, has_text
        self._headings = {
            (request_id, copy): _heading((number, len(request_ids)), (copy, num_copies))
            for number, request_id in enumerate(request_ids)
            for copy in range(num_copies)
        }
        self._waiting = deque(self._headings)
        self._texts: dict[tuple[str, int], list[str]] = {}
        self._ended: set[tuple[str, int]] = set()
        self._bold = (BOLD, PLAIN) if file.isatty() and not env.no_color() else ("", "")

    def add(self, output: RequestOutput) -> None:
        """Print what can be printed. ``output``: a delta, or a request's only output."""
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            if key not in self._texts:
                self._texts[key] = [self._headings[key], self._prompt_text(output)]
            if key not in self._ended:
                as_ids = "".join(f" {token_id}" for token_id in completion.token_ids)
                self._texts[key].append(completion.text if self._has_text else as_ids)
            if completion.finished():
                self._ended.add(key)
        while self._waiting and (texts := self._texts.get(self._waiting[0])) is not None:
            self._file.write("".join(texts))
            texts.clear()
            if self._waiting[0] not in self._ended:
                break
            self._file.write("\n")
            self._waiting.popleft()
        self._file.flush()

    def _prompt_text(self, output: RequestOutput) -> str:
        text = output.prompt
        if text is None:
            if self._tokenizer is None:
                text = " ".join(map(str, output.prompt_token_ids))
            else:
                text = self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        return f"{self._bold[0]}{text}{self._bold[1]}"


def _heading(request: tuple[int, int], copy: tuple[int, int]) -> str:
    """``--- prompt 2 of 3, output 1 of 2 ---``; each has an index and a number of all."""
    numbered = (("prompt", *request), ("output", *copy))
    places = [f"{name} {index + 1} of {total}" for name, index, total in numbered if total > 1]
    line = f"--- {', '.join(places)} ---\n" if places else ""
    return line if request[0] == copy[0] == 0 else f"\n{line}"


COMMAND = command.Command("generate", "continue prompts", _add_arguments, _run, _EPILOG, "[MODEL] ")

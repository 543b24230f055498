"""`fleetfoot embed`, `classify`, `reward` and `score`: vectors and scores of prompts, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fleetfoot.cli import arguments as flags
from fleetfoot.cli import command
from fleetfoot.cli.generate import dump_array
from fleetfoot.config.engine import EngineConfig
from fleetfoot.outputs import PoolingRequestOutput
from fleetfoot.records.pooling_params import PoolingParams

if TYPE_CHECKING:
    from fleetfoot.llm import LLM

_PARAMS = ("dimensions", "prompt_name", "use_activation", "truncate_prompt_tokens", "step_tag_id")
_TASKS = {"embed": "embed", "classify": "classify", "reward": "token_classify"}
_RESULTS = {
    "embed": "embedding (numbers; with --tokens, a list of them for each token)",
    "classify": "probs (of each class)",
    "reward": "rewards (for each token, a score of each class; of the tokens of --step-tag-id)",
    "score": "query, document, score",
}
_EPILOG = """\
It prints a JSON object on a line for each {what}, or with --json one array:
  {fields}, prompt_token_ids, num_cached_tokens"""


def _add_arguments(parser: argparse.ArgumentParser, *, call: str) -> None:
    text = partial(parser.add_argument, metavar="TEXT")
    file = partial(parser.add_argument, metavar="FILE")
    if call == "score":
        text("--query", help="the text that all documents are compared with")
        text("--document", action="append", default=[], help="give it again for more")
        file(
            "--pairs-file",
            help='{"query": ..., "document": ...} on each line; a list of documents too; - is standard input',
        )
        file("--chat-template", help="a Jinja template that joins query and document for a cross-encoder")
    else:
        text(
            "--prompt", action="append", default=[], help="give it again for more; without any, standard input is read"
        )
        file("--prompts-file", help='as of generate: a prompt, or in a .jsonl {"prompt": ...}, on each line')
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    number = partial(parser.add_argument, type=int, metavar="N")
    if call == "embed":
        number("--dimensions", help="first elements of each vector, for models that were trained so")
        parser.add_argument("--tokens", action="store_true", help="a vector of each token")
    if call == "reward":
        number("--step-tag-id", help="return the scores of this token alone")
    number("--truncate-prompt-tokens", help="keep so many tokens of a prompt; -1: as many as the model allows")
    parser.add_argument("--prompt-name", metavar="NAME", help="prompt of sentence-transformers, such as query")
    parser.add_argument(
        "--use-activation", action=argparse.BooleanOptionalAction, help="normalisation of vectors, softmax of scores"
    )
    flags.add_engine_arguments(parser, takes_model=True)


def _run(arguments: argparse.Namespace, *, call: str) -> int:
    with command.usage_errors():
        params = PoolingParams(**{name: getattr(arguments, name, None) for name in _PARAMS})
    inputs: list[Any] = (
        _pairs(arguments) if call == "score" else command.read_prompts(arguments.prompt, arguments.prompts_file)
    )
    template = _read_template(getattr(arguments, "chat_template", None))
    begin = time.perf_counter()
    with command.usage_errors():
        task = "token_embed" if getattr(arguments, "tokens", False) else _TASKS.get(call, "score")
        _check_task(call, task, flags.engine_config(arguments, runner="pooling"))  # before torch is imported
        from fleetfoot.llm import LLM

        llm = LLM(**{"runner": "pooling", **flags.given_settings(arguments)})
    with llm:
        start = time.perf_counter()
        show = {"pooling_params": params, "use_tqdm": sys.stderr.isatty()}
        with command.usage_errors():
            if call == "score":
                results = _scores(llm, inputs, chat_template=template, **show)
            else:
                results = _vectors(llm, call, inputs, pooling_task=task, **show)
        if arguments.json:
            print(dump_array(results))
        else:
            for result in results:
                print(json.dumps(msgspec.json.decode(msgspec.json.encode(result))))  # null for NaN
        num_tokens = sum(len(result["prompt_token_ids"]) for result in results)
        plan = llm.llm_engine.plan
        command.print_status(
            f"[{command.count(len(results), 'pair' if call == 'score' else 'prompt')}, "
            f"{command.count(num_tokens, 'token')} in {time.perf_counter() - start:.2f} s | "
            f"start {start - begin:.2f} s | {plan.device} {plan.dtype}, runner {llm.llm_engine.runner_name}]"
        )
    return 0


def _check_task(call: str, task: str, config: EngineConfig) -> None:
    """Raises ValueError, before anything is loaded: the model does not have the task."""
    from fleetfoot.plan.machine import Machine
    from fleetfoot.plan.resolve import resolve_plan

    pooling = resolve_plan(config, Machine.detect(), config_only=True).pooling
    if pooling is not None and task not in pooling.tasks:
        commands = [name for name, its_task in {**_TASKS, "score": "score"}.items() if its_task in pooling.tasks]
        raise ValueError(
            f"{call} needs the task {task!r}; this model has {', '.join(pooling.tasks)}: use fleetfoot "
            f"{' or '.join(commands)}, or another model"
        )


def _scores(llm: LLM, pairs: list[tuple[str, str]], **options: Any) -> list[dict[str, Any]]:
    outputs = llm.score([query for query, _ in pairs], [document for _, document in pairs], **options)
    return [
        {"query": query, "document": document, "score": output.outputs.score, **_prompt_of(output)}
        for (query, document), output in zip(pairs, outputs, strict=True)
    ]


def _vectors(llm: LLM, call: str, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
    key = {"embed": "embedding", "classify": "probs", "reward": "rewards"}[call]
    texts = [prompt if isinstance(prompt, str) else prompt.get("prompt") for prompt in prompts]
    return [
        {"prompt": text, key: output.outputs.data.tolist(), **_prompt_of(output)}
        for text, output in zip(texts, llm.encode(prompts, **options), strict=True)
    ]


def _prompt_of(output: PoolingRequestOutput) -> dict[str, Any]:
    return {"prompt_token_ids": output.prompt_token_ids, "num_cached_tokens": output.num_cached_tokens}


def _pairs(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    if (arguments.query is None) != (not arguments.document):
        raise command.UsageError("--query and --document go together; give a query, and one document or more")
    pairs = [(arguments.query, document) for document in arguments.document]
    if arguments.pairs_file is not None:
        for where, value in command.read_json_lines("--pairs-file", arguments.pairs_file):
            pairs += _read_pairs(where, value)
    if not pairs:
        raise command.UsageError("there are no pairs; give --query and --document, or --pairs-file FILE")
    return pairs


def _read_pairs(where: str, value: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in sorted(value.keys() ^ {"query", "document"}, key=value.__contains__, reverse=True):
        raise command.UsageError(
            f'{where}: {name} is {"unknown" if name in value else "missing"}; write {{"query": ..., "document": ...}}'
        )
    documents = value["document"] if isinstance(value["document"], list) else [value["document"]]
    for name, text in (("query", value["query"]), *(("document", document) for document in documents)):
        if not isinstance(text, str):
            raise command.UsageError(f"{where}: {name} is {text!r:.100}; it must be a text")
    yield from ((value["query"], document) for document in documents)


def _read_template(file: str | None) -> str | None:
    if file is None or "{" in file:
        return file
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise command.UsageError(f"--chat-template {file}: {error}") from error


def _command(call: str, help: str) -> command.Command:
    what = "pair" if call == "score" else "prompt"
    fields = _RESULTS[call] if call == "score" else f"prompt, {_RESULTS[call]}"
    epilog = _EPILOG.format(what=what, fields=fields)
    return command.Command(call, help, partial(_add_arguments, call=call), partial(_run, call=call), epilog, "[MODEL] ")


COMMANDS = (
    _command("embed", "compute a vector of each prompt"),
    _command("classify", "compute probabilities of classes of each prompt"),
    _command("reward", "compute scores of each token, with a reward model"),
    _command("score", "compare queries and documents"),
)

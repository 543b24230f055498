"""Prompts of a command: from flags, files or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetfoot.cli.command import UsageError
from fleetfoot.inputs import PromptType

STORY_OPENING = "Once upon a time, by the sea, there lived"
"""The default prompt: the embedded model tells stories."""

_KEYS = ("prompt", "prompt_token_ids")


def read_prompts(texts: Sequence[str], file: str | None) -> list[PromptType]:
    """Prompts from flags, then from a file; without either, standard input as one prompt, or `STORY_OPENING`.

    Args:
        file: a prompt on each line, or a JSON object if the name ends in ``.jsonl``; ``-`` is standard input.

    Raises:
        UsageError: the file cannot be read or has no prompts.
    """
    prompts: list[PromptType] = list(texts)
    if file is not None:
        prompts += read_prompts_file(file)
    return prompts or [_piped_prompt() or STORY_OPENING]


def read_prompts_file(file: str) -> list[PromptType]:
    """One prompt for each line that is not blank.

    Raises:
        UsageError: names the file, and the line that is not a prompt.
    """
    try:
        content = _read_stdin() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--prompts-file {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts-file {file} is not UTF-8 text: {error}") from error
    lines = [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"--prompts-file {file} holds no prompt: it has no line that is not blank")
    if file.endswith(".jsonl"):
        return [_read_json_prompt(line, f"{file}, line {number}") for number, line in lines]
    return [line.removesuffix("\r") for _, line in lines]


def _read_json_prompt(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict) or not any(key in value for key in _KEYS):
        raise UsageError(f'{where} is no prompt; write {{"prompt": "..."}} or {{"prompt_token_ids": [...]}}')
    return value  # the engine validates the values


def _piped_prompt() -> str:
    """Standard input without its last line break; empty if it is a terminal or absent."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return _read_stdin().removesuffix("\n").removesuffix("\r")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not {sys.stdin.encoding} text: {error}") from error

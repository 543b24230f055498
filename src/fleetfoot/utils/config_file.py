"""Flags from a file, ``--config FILE``: YAML, with the names of flags as keys, as for vLLM."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

FLAG = "--config"


def read_flags(
    path: str, find: Callable[[str], argparse.Action | None], given: Collection[str]
) -> tuple[list[str], list[str]]:
    """The words of a command line that a file stands for, and its keys that are no flags.

    Args:
        find: the action of a flag, which may be spelled with underscores; None: there is none.
        given: destinations of the flags on the command line. They win: the file's are left out.

    Raises:
        ValueError: the file cannot be read, or is not a mapping of flags.
    """
    words: list[str] = []
    unknown: list[str] = []
    for key, value in _read(path).items():
        action = find(f"--{key}")
        if action is None or f"--{key}" == FLAG:
            unknown.append(key)
        elif action.dest not in given and value is not None:
            words += _words(key, value, action)
    return words, unknown


def _words(key: str, value: Any, action: argparse.Action) -> list[str]:
    flag = f"--{key}"
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}; it must be true or false")
        if value:
            return [flag]
        if not isinstance(action, argparse.BooleanOptionalAction):
            return []
        return [f"--{key[3:]}" if key.startswith(("no-", "no_")) else f"--no-{key}"]
    if isinstance(value, list):
        texts = [_text(each) for each in value]
        if isinstance(action, argparse._AppendAction):
            return [f"{flag}={text}" for text in texts]
        if action.nargs in ("+", "*"):
            return [flag, *texts]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list | dict) else str(value)


def _read(path: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # only where there is a file

    class UniqueKeys(yaml.SafeLoader):
        """Refuses a key that is there twice, of which YAML's own loader keeps the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
            if twice is not None:
                raise ValueError(f"{twice} is there twice")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(Path(path).read_text("utf-8"), UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError("it must be a mapping from the names of flags, such as 'port: 8000'")
    return content

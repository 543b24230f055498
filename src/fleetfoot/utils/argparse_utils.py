"""The argument parser of vLLM's scripts, at vLLM's path."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads some further forms of arguments.

    - ``--max_model_len 9`` is ``--max-model-len 9``.
    - ``--flag.key 3 --flag.other.key text`` is ``--flag '{"key": 3, "other": {"key": "text"}}'``.
    - ``--config FILE`` stands for the keys of a YAML file as flags; the command line takes precedence.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if "--config" in words and "--config" not in self._option_string_actions:
            index = words.index("--config")
            first = int(not words[0].startswith("-"))  # behind the name of a subcommand
            words[index : index + 2], flags = [], self._read_config(words[index + 1 : index + 2])
            words[first:first] = flags
        return super().parse_known_args(self._join_objects([self._spelled(word) for word in words]), namespace)

    def _spelled(self, word: str) -> str:
        """A flag in the spelling with which it was added; other words unchanged."""
        flag = word.partition("=")[0].partition(".")[0]
        if not flag.startswith("--") or flag in self._option_string_actions:
            return word
        dashes = flag.replace("_", "-")
        known = (name for name in self._option_string_actions if name.replace("_", "-") == dashes)
        return next(known, flag) + word[len(flag) :]

    def _read_config(self, files: list[str]) -> list[str]:
        """The flags of ``--config``; ``files``: the words behind it, one or none."""
        import yaml  # type: ignore[import-untyped]  # needed for such files only

        try:
            items = yaml.safe_load(Path(*files).read_text()).items()
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            self.error(f"argument --config: expected a YAML file of keys and values: {error}")
        words: list[str] = []
        for key, value in items:
            if isinstance(value, bool):
                words += [f"--{key}"] if value else [flag for flag in [f"--no-{key}"] if self._has(flag)]
            elif value is not None:
                words.append(f"--{key}")
                words += [item if isinstance(item, str) else json.dumps(item) for item in _as_list(value)]
        return words

    def _has(self, flag: str) -> bool:
        return self._spelled(flag) in self._option_string_actions

    def _join_objects(self, words: list[str]) -> list[str]:
        """``words`` with dotted flags joined into one JSON object for each flag, at the end."""
        rest: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        following = iter(words)
        for word in following:
            name, has_value, value = word.partition("=")
            flag, _, path = name.partition(".")
            if not path or not self._has(flag):
                rest.append(word)
                continue
            target = objects.setdefault(flag, {})
            *outer, key = path.split(".")
            for part in outer:
                target = target.setdefault(part, {})
            target[key] = parse_value(value if has_value else next(following, ""))
        return rest + [word for flag, content in objects.items() for word in (flag, json.dumps(content))]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def parse_value(text: str) -> Any:
    """A JSON value; other text as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text

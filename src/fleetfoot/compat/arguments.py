"""An argument parser that takes vLLM's forms of flags, and files of them."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any

from fleetfoot.utils import config_file


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser with further forms of arguments.

    ``--max_model_len 9`` is ``--max-model-len 9``, and ``--flag.key 3 --flag.other.key text`` is
    ``--flag '{"key": 3, "other": {"key": "text"}}'``. A parser with the flag ``--config`` reads further flags from a
    YAML file; those of the command line win.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        rest: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        given = sys.argv[1:] if args is None else args
        words = iter(self._with_config_file(given) if config_file.FLAG in self._option_string_actions else given)
        for word in words:
            name, has_value, value = word.partition("=")
            flag, _, path = name.partition(".")
            known = self._spelled(flag)
            if not path or known not in self._option_string_actions:
                rest.append(known + word[len(flag) :])
                continue
            target = objects.setdefault(known, {})
            *outer, key = path.split(".")
            for part in outer:
                target = target.setdefault(part, {})
            target[key] = parse_value(value if has_value else next(words, ""))
        rest += [word for flag, content in objects.items() for word in (flag, json.dumps(content))]
        return super().parse_known_args(rest, namespace)

    def _with_config_file(self, words: Sequence[str]) -> Sequence[str]:
        """The words, and after them those of the file that ``--config`` names."""
        only = argparse.ArgumentParser(self.prog, usage=self.usage, add_help=False, allow_abbrev=False)
        only.add_argument(config_file.FLAG, dest="path")
        path = only.parse_known_args(words)[0].path
        if path is None:
            return words
        flags = [self._spelled(word.partition("=")[0].partition(".")[0]) for word in words if word.startswith("-")]
        given = {action.dest for flag in flags if (action := self._option_string_actions.get(flag)) is not None}
        if words[0][:1] != "-":
            given |= {action.dest for action in self._actions if not action.option_strings}
        try:
            further, unknown = config_file.read_flags(
                path, lambda flag: self._option_string_actions.get(self._spelled(flag)), given
            )
        except ValueError as error:
            self.error(f"{config_file.FLAG} {path}: {error}")
        if unknown:
            names = [name[2:] for name in self._option_string_actions if name.startswith("--")]
            near = difflib.get_close_matches(unknown[0].replace("_", "-"), names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if f"--{unknown[0]}" == config_file.FLAG:
                hint = " in a file; merge the files"
            self.error(f"{config_file.FLAG} {path}: {unknown[0]} is no flag of {self.prog}{hint}")
        return [*words, *further]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentError(action, error.message + hint) from None

    def _spelled(self, flag: str) -> str:
        """A flag with the dashes and underscores with which it was added; other words unchanged."""
        if not flag.startswith("--") or flag in self._option_string_actions:
            return flag
        dashes = flag.replace("_", "-")
        return next((name for name in self._option_string_actions if name.replace("_", "-") == dashes), flag)


def parse_value(text: str) -> Any:
    """A JSON value; other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

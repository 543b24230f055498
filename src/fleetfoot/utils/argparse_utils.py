"""An argument parser that takes vLLM's forms of flags."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser with two further forms of arguments.

    ``--max_model_len 9`` is ``--max-model-len 9``, and ``--flag.key 3 --flag.other.key text`` is
    ``--flag '{"key": 3, "other": {"key": "text"}}'``.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        rest: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        words = iter(sys.argv[1:] if args is None else args)
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

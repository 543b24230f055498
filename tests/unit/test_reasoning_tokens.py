"""Tokens of reasoning in whole messages and in streams."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetfoot.outputs import CompletionOutput
from fleetfoot.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, MessageFormat
from fleetfoot.server.conversation import GeneratedMessages


def count(text: str, cuts: list[int]) -> int | None:
    """Of a message whose tokens are characters, which arrives in pieces."""
    parser = MessageFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"]).parser([], is_reasoning=True)
    message = GeneratedMessages(cast(Any, None), [parser], len)
    for start, stop in itertools.pairwise([0, *cuts, len(text)]):
        reason = "stop" if stop == len(text) else None
        piece = CompletionOutput(0, text[start:stop], list(range(start, stop)), finish_reason=reason)
        message.chunks(cast(Any, SimpleNamespace(outputs=[piece])))
    return message.num_reasoning_tokens()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm. \n", 5),
        ("Hm, {1} </th", 12),
        ("Hm.</think>Yes, that is it.", 3),
        ("Hm, hm.</think>Yes", 15),
        ("</think>Yes", 0),
    ],
)
def test_streams_have_as_many_as_whole_messages(text: str, expected: int) -> None:
    assert count(text, []) == expected
    assert count(text, list(range(1, len(text)))) == expected
    assert count(text, [2, 4]) == expected

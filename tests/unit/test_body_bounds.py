"""What a body holds is counted in its bytes, before anything of it is built."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfoot.server import bounds
from fleetfoot.server.bounds import SMALL_BYTES, BodyLimits, cost_of, decode, must_scan, scan
from fleetfoot.server.conversion import decode_body
from fleetfoot.server.http import ApiError
from fleetfoot.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest

LIMITS = BodyLimits(
    tools=3, messages=4, prompts=5, token_ids=20, logit_bias=6, allowed_token_ids=7, bad_words=2, entries=8, depth=9,
    objects=30, values=60,
)  # fmt: skip
MESSAGE = {"role": "user", "content": "a"}


def refusal(body: Any, limits: BodyLimits = LIMITS) -> ApiError | None:
    try:
        scan(body if isinstance(body, bytes) else json.dumps(body).encode(), limits)
    except ApiError as error:
        assert error.status == 400
        return error
    return None


OVER: list[tuple[str, str, int, dict[str, Any]]] = [
    ("tools", "tools", 4, {"tools": [{}] * 4}),
    ("messages", "messages", 5, {"messages": [MESSAGE] * 5}),
    ("input", "messages", 5, {"input": [MESSAGE] * 5}),
    ("prompt", "prompts", 6, {"prompt": ["a"] * 6}),
    ("prompt", "prompts", 6, {"prompt": [[1]] * 6}),
    ("prompt", "token_ids", 21, {"prompt": [1] * 21}),
    ("tokens", "token_ids", 21, {"tokens": [1] * 21}),
    ("token_ids", "token_ids", 21, {"token_ids": [1] * 21}),
    ("logit_bias", "logit_bias", 7, {"logit_bias": {str(number): 1 for number in range(7)}}),
    ("allowed_token_ids", "allowed_token_ids", 8, {"allowed_token_ids": [1] * 8}),
    ("bad_words", "bad_words", 3, {"bad_words": ["a"] * 3}),
    ("messages", "entries", 9, {"messages": [{"content": [{}] * 9}]}),
    ("tools", "entries", 9, {"tools": [{"properties": {str(number): 1 for number in range(9)}}]}),
    ("guided_choice", "entries", 9, {"guided_choice": ["a"] * 9}),
    ("a", "depth", 10, {"b": [], "a": json.loads("[" * 9 + "]" * 9)}),
    ("messages", "objects", 33, {"messages": [[[]] * 7, [[]] * 7, [[]] * 7, [[]] * 5], "a": {"b": 1}}),
]


@pytest.mark.parametrize(("field", "limit", "count", "body"), OVER)
def test_a_list_above_its_limit(field: str, limit: str, count: int, body: dict[str, Any]) -> None:
    error = refusal(body)
    assert error is not None
    assert (error.param, f"{count}" in error.message) == (field, True), error
    assert f'{{"{limit}": {getattr(LIMITS, limit)}}}' in error.message
    raised = BodyLimits(**{one: 1000 for one in BodyLimits.__slots__})
    assert refusal(body, raised) is None


@pytest.mark.parametrize("key", ['"t\\u006fols":', '"tools"' + " " * 3000 + ":", '"tools":\n' + "\t" * 3000])
def test_a_field_is_known_in_any_spelling(key: str) -> None:
    error = refusal(b"{%b%b}" % (key.encode(), json.dumps([{}] * 4).encode()))
    assert error is not None and error.param == "tools"


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_commas_and_brackets_of_texts_do_not_count(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_CHUNK", chunk)
    texts = ['[{,,,"', "\\", '\\"', "\\\\", "[" * 30, '",",",",', "\\\\\\", "\u4e2d\\"]
    body = json.dumps({"prompt": texts[:5], "stop": texts[5:]}).encode()
    found = scan(body, LIMITS)
    assert found.kinds.tobytes() == b"{[,,,,],[,,]}"
    assert [chr(body[place]) for place in found.places] == list(found.kinds.tobytes().decode())
    assert found.depths.tolist() == [1, *[2] * 6, 1, *[2] * 4, 1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:\u4e2d'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k"\\{,'), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(body=st.dictionaries(st.text(alphabet="ab"), JSON, max_size=4), chunk=st.sampled_from([1, 5, 1000]))
def test_the_counts_are_those_of_the_values(body: dict[str, Any], chunk: int) -> None:
    def containers(value: Any) -> list[int]:
        children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
        return [] if children is None else [len(children), *(size for one in children for size in containers(one))]

    previous, bounds._CHUNK = bounds._CHUNK, chunk
    try:
        found = scan(json.dumps(body).encode(), BodyLimits())
    finally:
        bounds._CHUNK = previous
    sizes = containers(body)
    assert sum(found.kinds == ord(",")) == sum(max(0, size - 1) for size in sizes)
    assert sum((found.kinds == ord("[")) | (found.kinds == ord("{"))) == len(sizes)


def test_nothing_is_built_of_a_body_above_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_CHUNK", 64)
    body = b'{"prompt": [' + b'"a",' * 100_000
    scanned: list[int] = []
    real = bounds.np.frombuffer
    monkeypatch.setattr(bounds.np, "frombuffer", lambda text, kind: scanned.append(len(text)) or real(text, kind))
    assert refusal(body).param == "prompt"
    assert sum(scanned) < 1000  # it stops at a count that no body within the limits has


@pytest.mark.parametrize("text", [b"", b"{", b"]]]", b'{"a": "', b'{"prompt": }', b'{"a": [1, 2}', b"\\", b'{"a":[[1]'])
def test_a_body_that_is_not_json_is_left_to_the_decoder(text: bytes) -> None:
    if text:
        found = scan(text, BodyLimits())
        with pytest.raises(ApiError):
            decode(found, msgspec.json.Decoder(CompletionRequest))


def test_small_bodies_are_not_scanned() -> None:
    assert not must_scan(json.dumps({"messages": [MESSAGE] * 50}).encode(), BodyLimits())
    assert must_scan(json.dumps({"tools": [{}] * 1025}).encode(), BodyLimits())
    assert must_scan(b"[" * 256, BodyLimits())
    assert must_scan(json.dumps({"tools": [{}] * 3}).encode(), BodyLimits(tools=2))


BODIES: list[tuple[Any, dict[str, Any]]] = [
    (CompletionRequest, {"prompt": list(range(100)), "max_tokens": 3, "stop": ["a", "b"]}),
    (CompletionRequest, {"max_tokens": 3, "prompt": [[number, 5] for number in range(40)]}),
    (CompletionRequest, {"prompt": ['a"],[', "b\\"] * 40}),
    (CompletionRequest, {"prompt": [5.0] * 40}),
    (ChatRequest, {"messages": [MESSAGE] * 40, "tools": [{"a": [1, 2, {}]}] * 40}),
    (ChatRequest, {"messages": [MESSAGE] * 40 + [3], "tools": []}),
    (ChatRequest, {"messages": [MESSAGE] * 40, "unknown": [1] * 40}),
    (ChatRequest, {"messages": [MESSAGE], "tools": [*[{}] * 40, "x"]}),
    (CompletionRequest, {"prompt": [*[1] * 40, [1.5]]}),
    (CompletionRequest, {"prompt": [*["a"] * 40, {}]}),
    (DetokenizeRequest, {"tokens": [*[1] * 40, "a"]}),
]


@pytest.mark.parametrize(("kind", "content"), BODIES)
def test_a_list_in_pieces_is_decoded_as_the_whole(
    kind: Any, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "_PIECE", 8)
    body, decoder = json.dumps(content).encode(), msgspec.json.Decoder(kind)
    calls: list[int] = []
    monkeypatch.setattr(
        bounds,
        "decode_body",
        lambda text, *more, **options: calls.append(len(text)) or decode_body(text, *more, **options),
    )

    def outcome(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ApiError as error:
            return error.status, error.message, error.param

    found = scan(body, BodyLimits())
    assert outcome(decode, found, decoder) == outcome(decode_body, body, decoder)
    if "unknown" not in content:
        assert len(calls) > 1 and max(calls) < len(body)


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text('a"\\\n\U0001f600\u00e9ud8, {[\x01', max_size=120), min_size=3, max_size=3),
    is_ascii=st.booleans(),
    spaces=st.sampled_from(["", "  \n"]),
)
def test_a_text_in_pieces_is_decoded_as_the_whole(texts: list[str], is_ascii: bool, spaces: str) -> None:
    first, second, third = texts
    messages = [{"role": "user", "content": first}, {"role": "user", "content": [{"type": "text", "text": second}]}]
    fields = {"messages": messages, "chat_template_kwargs": {third: third}, "stop": texts}
    body = json.dumps(fields, ensure_ascii=is_ascii, separators=("," + spaces, spaces + ":")).encode()
    decoder = msgspec.json.Decoder(ChatRequest)
    with mock.patch.object(bounds, "_LONG_TEXT", 37):
        assert decode(scan(body, BodyLimits()), decoder) == decoder.decode(body)


def test_a_long_text_that_is_not_valid_is_an_error_of_its_place() -> None:
    body = b'{"prompt": ["b", "' + b"a" * (1 << 20) + b'\\ud800"], "max_tokens": 1}'
    with pytest.raises(ApiError, match=r"prompt\[1\] has .*half of a character"):
        decode(scan(body, BodyLimits()), msgspec.json.Decoder(CompletionRequest))


def test_twice_the_same_field() -> None:
    body = b'{"prompt": [%b], "prompt": [7]}' % b",".join([b"1"] * 50_000)
    assert decode(scan(body, BodyLimits()), msgspec.json.Decoder(CompletionRequest)).prompt == [7]


def test_the_documentation_has_all_limits_and_their_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    table = page[page.index("| limit | default |") :].partition("\n\n")[0]
    rows = (line.split(" | ") for line in table.splitlines()[2:])
    counts = ((re.findall(r"`(\w+)`", names), int(default.replace(",", ""))) for names, default, _ in rows)
    found = {name: count for names, count in counts for name in names}
    assert found == dataclasses.asdict(BodyLimits())


def test_many_lists_and_objects_cost_more_than_their_bytes() -> None:
    """They leave the event loop, as large bodies do."""
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": {}}} for number in range(1000)]
    deep = [json.loads("[" * 50 + "]" * 50) for _ in range(100)]
    calls = [{"function": {"name": "f", "arguments": json.dumps({"a": [0] * 10_000})}}]
    bodies = {"tools": tools}, {"messages": [{"x": deep}]}, {"messages": [{"tool_calls": calls}]}
    for body in (*bodies, {"prompt": "a" * SMALL_BYTES}):
        assert cost_of(msgspec.json.encode(body)) > SMALL_BYTES
    small = msgspec.json.encode({"tools": tools[:20], "messages": [{"role": "user", "content": "[" * 100}]})
    assert cost_of(small) == len(small)

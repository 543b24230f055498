"""Logs as text: what a client sends makes no line of its own."""

import io
import json
import logging

import pytest

from fleetfoot.utils.logs import REQUEST_ID, TextFormatter, escaped, log_to_stderr

ATTACKS = {
    "%0a": "/v1\nERROR fleetfoot: forged",
    "carriage return": "/v1\rERROR fleetfoot: forged",
    "terminal": "/v1\x1b[2J\x1b]0;title\x07\x9b31m",
    "separators": "a\u2028b\u2029c\u0085d\x0be\x0cf",
    "bidi": "a\u202eb\u2066c\u200fd",
    "surrogate": "\udcff",
    "null": "a\0b",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_everything_in_a_record_is_escaped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an argument, in the message, in the logger's name, in the request's id and in an error's text."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    token = REQUEST_ID.set(text)
    with log_to_stderr(logging.INFO):
        logger = logging.getLogger(f"fleetfoot.{text}")
        logger.info("a request: %s", text)
        logger.info(f"a request: {text}")
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception("it failed")
    REQUEST_ID.reset(token)
    records = stream.getvalue().removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in records)
    assert sum(not line.startswith("  ") for line in records) == 3  # lines of the traceback are indented
    assert escaped(text) in records[0] and escaped(text) in records[1]


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_json_lines_are_printable_and_whole(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with log_to_stderr(logging.INFO, "json"):
        logging.getLogger("fleetfoot.x").info("a request: %s", text)
    (line,) = stream.getvalue().split("\n")[:-1]
    assert line.isprintable()
    assert json.loads(line)["message"] == f"a request: {text}"


def test_plain_text_is_unchanged() -> None:
    assert escaped("Grüße, 世界 🙂: \\n 'x'") == "Grüße, 世界 🙂: \\n 'x'"
    assert escaped("a\tb\n") == "a\\tb\\n"


def test_text_of_another_formatter_is_not_used() -> None:
    record = logging.LogRecord("a", logging.ERROR, "", 0, "b", (), (ValueError, ValueError("c\nd"), None))
    logging.Formatter().format(record)
    assert record.exc_text == "ValueError: c\nd"
    assert TextFormatter("%(message)s").format(record) == "b\n  ValueError: c\n  d"

"""Flags from a YAML file: ``--config FILE``."""

import argparse
import json
from pathlib import Path

import pytest

from fleetfoot.cli.main import _parse, make_parser


@pytest.fixture
def parse(tmp_path: Path):
    def parsed(content: str, *words: str) -> argparse.Namespace:
        path = tmp_path / "flags.yaml"
        path.write_text(content)
        return _parse(make_parser(), ["serve", *[word.replace("FILE", str(path)) for word in words]])

    return parsed


def test_all_forms_of_values(parse) -> None:
    found = parse(
        """
        model: some/where
        port: 9000
        max_model_len: 77
        enable-prefix-caching: false
        enforce-eager: true
        access-log: false
        no-enable-chunked-prefill: true
        served-model-name: [one, two]
        api-key: [secret, -other]
        allowed-origins: ["http://a"]
        revision: "1.0"
        root-path: -odd
        dtype:
        speculative-config: {method: ngram, num_speculative_tokens: 3}
        """,
        "--config=FILE",
    )
    values = vars(found)
    expected = {
        "engine.model": "some/where", "port": 9000, "engine.max_model_len": 77, "engine.enable_prefix_caching": False,
        "engine.enforce_eager": True, "access_log": False, "engine.enable_chunked_prefill": False,
        "served_model_name": ["one", "two"], "api_key": ["secret", "-other"], "allowed_origins": ("http://a",),
        "engine.revision": "1.0", "root_path": "-odd",
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert "engine.dtype" not in values
    assert json.loads(values["engine.speculative_config"]) == {"method": "ngram", "num_speculative_tokens": 3}


def test_the_command_line_wins(parse) -> None:
    content = "{model: a, port: 1, enforce-eager: true, api-key: [k], speculative-config: {method: ngram}}"
    words = ("b", "--config", "FILE", "--port=2", "--no-enforce_eager", "--api-key", "own")
    found = vars(parse(content, *words, "--speculative-config.method", "medusa"))
    assert (found["engine.model"], found["port"], found["engine.enforce_eager"]) == ("b", 2, False)
    assert found["api_key"] == ["own"] and json.loads(found["engine.speculative_config"]) == {"method": "medusa"}
    assert vars(parse("model: a", "--model", "b", "--config", "FILE"))["engine.model"] == "b"
    assert vars(parse("", "--config", "FILE"))["port"] == 8000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-model-length: 5", "max-model-length is no flag of fleetfoot serve; did you mean max-model-len?"),
        ("config: other.yaml", "config is no flag of fleetfoot serve in a file; merge the files"),
        ("enforce-eager: 1", "enforce-eager is 1; it must be true or false"),
        ("port: many", "'many' is no port"),
        ("- port", "it must be a mapping"),
        ("port: [", "it is no YAML"),
        ("port: 1\nport: 2", "port is there twice"),
        ("1: 2", "it must be a mapping"),
    ],
)
def test_invalid_files(parse, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(content, "--config", "FILE")
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--config", "/no/such"], "/no/such: it cannot be read"), (["--config"], "one argument")):
        with pytest.raises(SystemExit):
            _parse(make_parser(), ["serve", *words])
        assert message in capsys.readouterr().err

"""What a model's generation_config.json and its override make of the sampling defaults."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fleetfoot.config.engine import EngineConfig
from fleetfoot.sampling.request_params import read_sampling_defaults

ALL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05, "max_new_tokens": 300}
OTHER = {"eos_token_id": 5, "do_sample": True, "num_beams": 4, "transformers_version": "4.51.0"}


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "generation_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("content", "setting", "override", "expected"),
    [
        (None, "auto", None, {}),
        (None, "auto", {"top_k": 3}, {"top_k": 3}),
        ({**ALL, **OTHER}, "auto", None, {**ALL, "max_tokens": 300}),
        ({"top_p": 0.8, "temperature": None}, "auto", None, {"top_p": 0.8}),
        ({"do_sample": False}, "auto", None, {}),  # which leaves the temperature as it is
        ({"do_sample": False, "bos_token_id": 1}, "auto", None, {}),
        ({}, "auto", None, {}),
        *((ALL, setting, None, {}) for setting in ("none", "vllm")),
        *((ALL, setting, {"max_new_tokens": 9}, {"max_tokens": 9}) for setting in ("none", "vllm")),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            "auto",
            {"temperature": 0.1, "top_p": None, "max_new_tokens": 5},
            {"temperature": 0.1, "top_k": 20, "max_tokens": 5},
        ),
    ],
)
def test_defaults(
    content: Any, setting: str, override: dict[str, Any] | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    if content is not None:
        write(tmp_path, content)
    before = copy.copy(override)
    expected = {name: value for name, value in expected.items() if name != "max_new_tokens"}
    assert read_sampling_defaults(setting, override, str(tmp_path)) == expected
    assert override == before


def test_a_folder_stands_in_for_the_models_own(tmp_path: Path) -> None:
    write(tmp_path / "model", ALL)
    write(tmp_path / "mine", {"top_k": 5})
    assert read_sampling_defaults(str(tmp_path / "mine"), None, tmp_path / "model") == {"top_k": 5}
    message = r"generation_config is 'no/such', but there is no file .*no/such/generation_.*'auto'.*'none'"
    with pytest.raises(ValueError, match=message):
        read_sampling_defaults("no/such", None, tmp_path / "model")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.5, "temperature must be 0"),
        ("temperature", "warm", "temperature must be 0"),
        ("top_p", 1.5, r"top_p must be a number in \(0, 1\]"),
        ("top_k", 2.5, "top_k must be an integer"),
        ("min_p", True, r"min_p must be a number in \[0, 1\]"),
        ("repetition_penalty", 0, "repetition_penalty must be"),
        ("max_new_tokens", 0, "max_tokens must be None or an integer of at least 1"),
    ],
)
def test_values_out_of_range(field: str, value: Any, allowed: str, tmp_path: Path) -> None:
    path = write(tmp_path, {field: value})
    for setting, override, source in (("auto", None, path), ("none", {field: value}, "override_generation_config")):
        with pytest.raises(ValueError, match=allowed) as caught:
            read_sampling_defaults(setting, override, tmp_path)
        assert str(caught.value).startswith(f"{source}: {field} is {value!r}: ")
        assert ("generation_config='none'" in str(caught.value)) == (source == path)
    valid = read_sampling_defaults("auto", {field: ALL[field]}, tmp_path)  # instead of the file's value
    assert list(valid.values()) == [ALL[field]]


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read as JSON"), ("[]", "holds a JSON list")])
def test_a_file_that_is_no_object(content: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_sampling_defaults("auto", None, tmp_path)
    assert str(path) in str(caught.value)


def test_the_settings(tmp_path: Path) -> None:
    config = EngineConfig()
    assert (config.generation_config, config.override_generation_config) == ("auto", None)
    given = {"top_k": 3}
    config = EngineConfig.from_keywords(
        {"generation_config": tmp_path, "override_generation_config": given}, owner="LLM"
    )
    assert config.generation_config == str(tmp_path)
    given["top_k"] = 4
    assert config.override_generation_config == {"top_k": 3}
    assert EngineConfig(override_generation_config='{"top_k": 3}').override_generation_config == {"top_k": 3}  # type: ignore[arg-type]
    assert isinstance(hash(config), int)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"generation_config": ""}, ValueError, "generation_config is an empty string"),
        ({"generation_config": None}, TypeError, "generation_config is None"),
        ({"override_generation_config": [1]}, TypeError, r"override_generation_config is \[1\]; it must be a JSON obj"),
        ({"override_generation_config": "{"}, ValueError, "override_generation_config is not JSON"),
        ({"override_generation_config": {"max_tokens": 5}}, TypeError, "'max_tokens'; did you mean 'max_new_tokens'"),
        ({"override_generation_config": {"do_sample": True}}, TypeError, "'do_sample'; it takes temperature, top_p"),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(**settings)

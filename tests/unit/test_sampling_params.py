"""SamplingParams: every field's range, its errors, and what it becomes; and sampling defaults of a model."""

import copy
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetfoot.config.engine import EngineConfig
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams, bad_words_token_ids
from fleetfoot.sampling.request_params import read_sampling_defaults
from fleetfoot.utils.validation import FieldError, unknown_keyword


def test_defaults_and_positional_order_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    names = list(inspect.signature(SamplingParams).parameters)
    assert names[:12] == [
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "seed", "stop", "stop_token_ids", "ignore_eos",
    ]  # fmt: skip
    assert SamplingParams(1, 0.5, 0.25).frequency_penalty == 0.25


REFUSED = [
    ("n", 0), ("n", -1), ("n", 1.0), ("n", True), ("n", 16385),
    ("presence_penalty", 2.1), ("presence_penalty", float("nan")), ("presence_penalty", "1"),
    ("frequency_penalty", -2.1), ("frequency_penalty", float("inf")), ("frequency_penalty", None),
    ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", float("inf")),
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", True), ("temperature", 1e-31),
    ("temperature", 10**400), ("temperature", None),
    ("top_p", 0), ("top_p", 1.01), ("top_p", -0.5), ("top_p", float("nan")),
    ("top_k", -2), ("top_k", 1.5), ("top_k", True), ("top_k", None),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", float("nan")),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", False), ("seed", "1"),
    ("stop", [""]), ("stop", ""), ("stop", 5), ("stop", ["a", 3]), ("stop", "\ud800"),
    ("stop_token_ids", [-1]), ("stop_token_ids", [1.0]), ("stop_token_ids", "12"), ("stop_token_ids", 3),
    ("bad_words", [""]), ("bad_words", "word"), ("bad_words", [1]),
    ("ignore_eos", 1), ("ignore_eos", None), ("detokenize", "yes"), ("skip_special_tokens", 0),
    ("spaces_between_special_tokens", None), ("include_stop_str_in_output", 1),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.0), ("max_tokens", True),
    ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", None),
    ("logprobs", -2), ("logprobs", True), ("logprobs", 1.0), ("prompt_logprobs", -2), ("prompt_logprobs", False),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: float("-inf")}), ("logit_bias", {1: "x"}), ("logit_bias", [1]), ("logit_bias", {1.0: 1.0}),
    ("logit_bias", {1: 1.0, "1": 2.0}), ("logit_bias", {"1" * 5000: 1.0}),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", np.array(1)),
    ("output_kind", 0), ("output_kind", "DELTA"),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refused_values_name_the_field_and_the_value(name, value):
    with pytest.raises(FieldError) as info:
        SamplingParams(**{name: value})
    assert info.value.field.partition("[")[0] == name
    wrong = [value, *([value[-1]] if isinstance(value, list) and value else [])]
    wrong += [part for item in value.items() for part in item] if isinstance(value, dict) else []
    assert repr(info.value.value) in map(repr, wrong)


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", 5),
        ({"stop": "x", "detokenize": False}, "stop", ["x"]),
        ({"n": 2, "temperature": 0}, "n", 2),
    ],
)
def test_fields_that_must_agree(fields, field, value):
    with pytest.raises(FieldError) as info:
        SamplingParams(**fields)
    assert (info.value.field, info.value.value) == (field, value)


def test_unknown_keyword_lists_near_matches():
    with pytest.raises(
        TypeError, match="SamplingParams got an unknown keyword 'temprature'; did you mean 'temperature'"
    ):
        SamplingParams(temprature=0.5)
    with pytest.raises(TypeError, match=r"unknown keyword 'zzz'; it takes .*top_p"):
        SamplingParams(zzz=1)
    error = unknown_keyword("LLM", "max_seqs", ["max_num_seqs", "block_size"])
    assert isinstance(error, TypeError) and "'max_num_seqs'" in str(error) and "block_size" not in str(error)


@pytest.mark.parametrize(
    ("fields", "model", "value"),
    [
        ({"stop_token_ids": [9, 10]}, {}, [10]),
        ({"allowed_token_ids": [11]}, {}, [11]),
        ({"logit_bias": {"12": 1.0}}, {}, [12]),
        ({"logprobs": 6}, {"max_logprobs": 5}, 6),
        ({"prompt_logprobs": -1}, {"max_logprobs": 5}, -1),
        ({"stop": "x"}, {"has_tokenizer": False}, ["x"]),
        ({"bad_words": ["x"]}, {"has_tokenizer": False}, ["x"]),
    ],
)
def test_validate_for_model_refuses(fields, model, value):
    with pytest.raises(FieldError) as info:
        SamplingParams(**fields).validate_for_model(**{"vocab_size": 10, **model})
    assert (info.value.field, info.value.value) == (next(iter(fields)), value)


def test_bad_words_are_spelt_with_and_without_a_leading_space():
    vocabulary = {"foo": [1, 2], " foo": [3], "bar": [4], " bar": [5, 4], "\n": [6], "": []}
    assert bad_words_token_ids(["foo", " bar", "\n"], vocabulary.__getitem__) == [[1, 2], [3], [4], [5, 4], [6]]
    # What holds a token that the model does not have cannot be generated.
    assert bad_words_token_ids(["foo", "bar"], vocabulary.__getitem__, vocab_size=4) == [[1, 2], [3]]
    # A tokenizer that adds the space itself spells both alike.
    assert bad_words_token_ids(["x", "x"], lambda text: [7]) == [[7]]
    with pytest.raises(FieldError) as info:
        bad_words_token_ids(["q"], lambda text: [])
    assert (info.value.field, info.value.value) == ("bad_words", "q")


def test_parameters_need_no_torch():
    modules = "fleetfoot.sampling_params, fleetfoot.sampling.request_params, fleetfoot.outputs"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
        ("max_new_tokens", 0, "max_tokens must be an integer of at least 1, or not set"),
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

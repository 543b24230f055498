"""Stock ``torch.compile`` over the plain layers, on Model Runner V1."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import make_engine, prompt_of, run_requests
from torch._dynamo.utils import counters

from fleetfoot import SamplingParams

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_batched_tokens": 16}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own
def test_tokens_are_those_of_plain_layers_and_serving_compiles_nothing(text_model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    requests = {
        str(length): ({"prompt_token_ids": prompt_of(length, 100, seed=length)}, params) for length in (1, 2, 7, 40)
    }
    ways: tuple[dict[str, Any], ...] = ({"model_runner": "v1"}, {"compilation_config": {"mode": 1}})
    engines = [make_engine(text_model, **SETTINGS, **way) for way in ways]
    counters.clear()
    plain, compiled = (run_requests(engine, requests) for engine in engines)
    assert [engine.runner_name for engine in engines] == ["v1", "v1"]
    for name in requests:
        assert compiled[name].outputs[0].token_ids == plain[name].outputs[0].token_ids
    patches = [{"name": "model.layers.0.mlp.up_proj.weight", "indices": range(0, 6000, 7), "values": [0.5] * 858}]
    for engine in engines:
        engine.apply_sparse_weight_patches(patches)
    plain, compiled = (run_requests(engine, requests) for engine in engines)
    for name in requests:
        assert compiled[name].outputs[0].token_ids == plain[name].outputs[0].token_ids
    assert not counters["stats"]["unique_graphs"]

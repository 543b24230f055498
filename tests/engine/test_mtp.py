"""Drafts from the layer of a checkpoint that predicts a second token: what it computes, and the target's tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import make_engine, prompt_of, run_requests
from tests.helpers.paged_models import MODELS, PagedCache, assert_close, context
from tests.helpers.second_tokens import SecondTokenLayer, make_mtp_checkpoint

from fleetfoot import SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.models.qwen3_next import MultiTokenPredictor
from fleetfoot.speculative.eagle import OTHERS_THAN_MTP
from fleetfoot.speculative.find import find_drafter
from fleetfoot.weights.checkpoint import load_safetensors

FIELDS = {**MODELS["qwen3-next"][1], "mlp_only_layers": [], "max_position_embeddings": 512}
SETTINGS = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, SecondTokenLayer]:
    """A checkpoint, the target, and the layer."""
    folder = tmp_path_factory.mktemp("mtp")
    return folder, *make_mtp_checkpoint(folder, **FIELDS)


def test_it_computes_what_transformers_does(model: tuple[Path, Any, SecondTokenLayer]) -> None:
    folder, _, reference = model
    config = EngineConfig(model=str(folder), speculative_config=SETTINGS)
    found = find_drafter(config, load_model_config(folder), folder)
    assert found is not None
    head = MultiTokenPredictor(found.config, context())
    load_safetensors(head.weight_specs(), folder, unread=OTHERS_THAN_MTP)
    head.process_weights_after_loading()
    embeddings, hidden = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(1))
    cache, outputs = PagedCache(found.config, 4), []
    with torch.no_grad():
        for first, end in ((0, 6), (6, 7), (7, 9)):
            _, ctx = cache.step({0: [0] * (end - first)})
            outputs.append(head(embeddings[first:end], hidden[first:end], ctx))
        assert_close(torch.cat(outputs), reference(embeddings, hidden))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tokens_are_the_targets(model: tuple[Path, Any, SecondTokenLayer], runner: str) -> None:
    folder, target, _ = model
    prompts = [prompt_of(length, 101, seed=length) for length in (3, 30, 17)]
    expected = {}
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                tokens.append(int(target(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        expected[str(number)] = tokens[len(prompt) :]
    options = {"model_runner": runner, "skip_tokenizer_init": True, "block_size": 4, "max_num_batched_tokens": 24}
    engine = make_engine(folder, speculative_config=SETTINGS, **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = run_requests(engine, {str(number): (prompt, params) for number, prompt in enumerate(prompts)})
    assert {name: list(output.outputs[0].token_ids) for name, output in outputs.items()} == expected
    assert engine.stats().scheduler.drafts.num_drafted > 0
    engine.shutdown()

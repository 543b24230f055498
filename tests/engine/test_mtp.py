"""Drafts from the layer of a checkpoint that predicts a second token: what it computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.paged_models import MODELS, PagedCache, assert_close, context
from tests.helpers.second_tokens import SecondTokenLayer, make_mtp_checkpoint

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

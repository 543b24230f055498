"""Drafts from the layer of a checkpoint that predicts a second token: what it computes, and the target's tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_engine, prompt_of, run_requests
from tests.helpers.paged_models import MODELS, PagedCache, assert_close, context
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from fleetfoot import SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.models.qwen3_next import MultiTokenPredictor
from fleetfoot.speculative.eagle import OTHERS_THAN_MTP
from fleetfoot.speculative.find import find_drafter
from fleetfoot.weights.checkpoint import load_safetensors

FIELDS = {**MODELS["qwen3-next"][1], "mlp_only_layers": [], "max_position_embeddings": 512}
SETTINGS = {"method": "mtp", "num_speculative_tokens": 2}


class Reference(torch.nn.Module):
    """The layer in modules of ``transformers``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        norms = {name: Qwen3NextRMSNorm(size, config.rms_norm_eps) for name in ("embedding", "hidden", "final")}
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms.values()
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        index = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList([Qwen3NextDecoderLayer(config, index)])
        self._rotary = Qwen3NextRotaryEmbedding(config)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)), dim=-1))[None]
        mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        angles = self._rotary(x, torch.arange(len(hidden))[None])
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask))[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Reference]:
    """A checkpoint, the target, and the layer."""
    folder = tmp_path_factory.mktemp("mtp")
    target = make_checkpoint(folder, "qwen3_next", **FIELDS)
    layer, generator = Reference(target.config).eval(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
    file = folder / "model.safetensors"
    added = {f"mtp.{name}": value.contiguous() for name, value in layer.state_dict().items()}
    save_file({**load_file(file), **added}, file, {"format": "pt"})
    return folder, target, layer


def test_it_computes_what_transformers_does(model: tuple[Path, Any, Reference]) -> None:
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
def test_tokens_are_the_targets(model: tuple[Path, Any, Reference], runner: str) -> None:
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

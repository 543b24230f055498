"""The whole engine on a GPU, with drafts and without: captured and eager steps have the CPU's float32 tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.gguf_files import write_gguf
from tests.helpers.schedules import assert_lives_agree, live_alone, random_lives

from fleetfoot import SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]

ASSETS = Path(__file__).parent.parent / "assets"
MODELS = {"llama": embedded_model_path(), "qwen3": ASSETS / "story-qwen3", "mistral": ASSETS / "story-mistral"}
VOCAB = 2048
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"model_runner": "v2"},
    "eager": {"model_runner": "v2", "enforce_eager": True},
    "v1": {"model_runner": "v1"},
    "tight": {"model_runner": "v2", "num_gpu_blocks_override": 12, "max_num_batched_tokens": 24},
}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {"head_dim": 16, "hidden_size": 64, "residual_multiplier": 0.3, "logits_scaling": 2.0}),
    "phi3": ("phi3", {"head_dim": 16, "hidden_size": 64, "partial_rotary_factor": 0.75}),
    "smollm3": ("smollm3", {"head_dim": 16, "hidden_size": 64, "no_rope_layer_interval": 2}),
}
"""Models whose fused layers differ from those of the trained ones in `tests/assets`."""
OTHERS = UNTRAINED | FUSED
ODD_HEADS = {"odd heads": ("llama", {"head_dim": 12, "hidden_size": 64})}
"""No kernel supports them: attention runs in torch, and graphs are not captured."""
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft": {"method": "draft_model", "model": str(ASSETS / "story-draft"), "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "num_speculative_tokens": 2},
}
OPENING = [0, 587, 349, 286, 264, 1008]  # of the embedded model: Once there was a fox


def engine(model: Path, device: str, **options: object) -> LLMEngine:
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 256, "block_size": 16}
    return make_engine(
        model, device=device, dtype="float32", max_model_len=80, skip_tokenizer_init=True, **{**limits, **options}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    untrained = OTHERS | ODD_HEADS
    made = {name: tmp_path_factory.mktemp(name) for name in untrained}
    for name, folder in made.items():
        model_type, fields = untrained[name]
        make_checkpoint(folder, model_type, vocab_size=VOCAB, **fields)
    return MODELS | made


@pytest.fixture
def reference(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[LLMEngine]:
    made = engine(folders[getattr(request, "param", "llama")], "cpu", model_runner="v1", enable_prefix_caching=False)
    yield made
    made.shutdown()


def checked_engine(reference: LLMEngine, model: Path, **settings: Any) -> tuple[LLMEngine, Any]:
    """An engine with the tokens of the reference, and its graphs, if it has any."""
    tried = engine(model, "cuda", **settings)
    assert tried.runner_name == settings["model_runner"]
    for seed in range(3):
        lives = random_lives(seed, VOCAB)
        assert_lives_agree(tried, lives, live_alone(reference, lives), f"seed {seed}", tolerance=1e-3)
    return tried, getattr(tried.core.executor.runner, "graphs", None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("reference", "model"), [(name, name) for name in (*MODELS, *OTHERS)], indirect=["reference"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_the_cpus(reference: LLMEngine, folders: dict[str, Path], model: str, way: str) -> None:
    tried, graphs = checked_engine(reference, folders[model], **WAYS[way])
    if way == "graphs":
        assert graphs.num_steps["decode"] > 0
        assert graphs.captured
    tried.shutdown()


@pytest.mark.parametrize("reference", list(ODD_HEADS), indirect=True)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_heads_without_a_kernel(reference: LLMEngine, folders: dict[str, Path], runner: str) -> None:
    tried, graphs = checked_engine(reference, folders["odd heads"], model_runner=runner)
    assert tried.plan.kernels["attention"] == "sdpa"
    assert graphs is None or not graphs.captured
    tried.shutdown()


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("method", DRAFTS)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_drafts_change_no_token(reference: LLMEngine, runner: str, method: str, adaptive: bool) -> None:
    drafts = {**DRAFTS[method], "adaptive": adaptive}
    tried, graphs = checked_engine(reference, MODELS["llama"], model_runner=runner, speculative_config=drafts)
    assert tried.stats().scheduler.drafts.num_drafted > 0
    if runner == "v2":
        assert graphs.num_steps["uniform"] > 0
    tried.shutdown()


@pytest.mark.parametrize("method", ["draft", "eagle"])
def test_most_drafts_are_accepted(method: str) -> None:
    tried = engine(MODELS["llama"], "cuda", model_runner="v2", speculative_config={**DRAFTS[method], "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    run_requests(tried, {str(number): ([*OPENING, number], params) for number in range(4, 12)})
    assert tried.stats().scheduler.drafts.acceptance_rate > 0.5
    tried.shutdown()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_gguf_file_keeps_its_codes(runner: str, tmp_path: Path) -> None:
    """In graphs and without: the first tokens of a CPU, which quantizes inputs; fewer bytes than dequantized."""
    pytest.importorskip("gguf")
    path = write_gguf(MODELS["llama"], tmp_path / "story.gguf", _types_of_parts)
    found = []
    for device in ("cpu", "cuda"):
        made = make_engine(path, device=device, dtype="bfloat16", max_model_len=80, num_gpu_blocks_override=64,
                           skip_tokenizer_init=True, model_runner=runner)  # fmt: skip
        made.add_request(
            "0", {"prompt_token_ids": OPENING}, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        )
        outputs = [each for _ in range(20) for each in made.step() if each.finished]
        found.append([list(each.outputs[0].token_ids) for each in outputs])
        assert (
            "Q4_1, Q8_0" in made._plan.linear_methods.of(f"model.layers.0.self_attn.{each}_proj" for each in "qkv").name
        )
        made.shutdown()
    assert found[0] == found[1] and len(found[0][0]) == 4


def _types_of_parts(module: str) -> str:
    return "Q8_0" if module.endswith(("v_proj", "down_proj")) else "Q5_1" if "layers.1" in module else "Q4_1"

"""``speculative_config``: what it takes, which drafter it means, whether that fits, and its memory; the EAGLE head and
a direct computation, the shapes of its checkpoints, and the short steps of drafters."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.helpers.kernels import cpu_kernels
from tests.helpers.specs import model_config

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.fusion import plan_fusion
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.layers.context import ModelContext
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.forward_context import AttentionMetadata
from fleetfoot.records.weights import WeightError
from fleetfoot.speculative.drafter import DraftBatch, DrafterContext, DraftSteps
from fleetfoot.speculative.eagle import EagleDrafter
from fleetfoot.speculative.find import DrafterModel, find_drafter


def parse(**settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"num_speculative_tokens": 3, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is missing or 0; it must be given"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be an integer of at least 1"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is None"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": False}, "num_speculative_tokens is False"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65; it can be at most 64"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min is 3 and prompt_lookup_max is 2"),
        ({"method": "eagle", "prompt_lookup_max": 3}, "prompt_lookup_max is 3, which means nothing for .*'eagle'"),
        ({"model": "a/draft", "prompt_lookup_min": 1}, "prompt_lookup_min is 1, which means nothing"),
        ({"method": "ngram", "model": "a/draft"}, "model is 'a/draft', and method 'ngram' takes none"),
        ({"method": "draft_model"}, "method 'draft_model' needs a model"),
        ({"method": "eagle3", "model": "a/head"}, "EAGLE-3 heads, .* are not supported; method 'eagle' takes"),
        ({"method": "medusa"}, "method is 'medusa'; it can be ngram, draft_model, eagle"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size is 0"),
        ({"disable_by_batch_size": "8"}, "disable_by_batch_size is '8'"),
        ({"adaptive": 1}, "adaptive is 1; it must be true or false"),
        ({"model": "[ngram]"}, r"model is '\[ngram\]', which is no model here; set method to 'ngram'"),
        ({"model": "ngram", "method": "ngram"}, "a folder of that name is './ngram'"),
    ],
    ids=str,
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**settings)


def test_invalid_keys() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is missing or 0"):
        EngineConfig(speculative_config={"method": "eagle"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'disable_by_batch_size'"):
        parse(disable_by_batchsize=8)
    with pytest.raises(TypeError, match=r"'draft_tensor_parallel_size'; .* each rank runs the whole drafter"):
        parse(draft_tensor_parallel_size=2)
    assert parse(disable_padded_drafter_batch=False, revision=None, draft_tensor_parallel_size=1) == parse()
    assert parse(model=Path("a") / "draft").model == "a/draft"


def drafting(k: int, **settings: Any) -> EngineConfig:
    return EngineConfig(speculative_config={"num_speculative_tokens": k}, **settings)  # type: ignore[arg-type]


def test_a_step_must_hold_the_drafts_of_every_request() -> None:
    assert drafting(3, max_num_seqs=4, max_num_batched_tokens=16).max_decode_tokens == 16
    message = r"is 15, .* 4 tokens, one and 3 drafts, .* max_num_seqs \(4\): raise it to 16, or set max_num_seqs=3"
    with pytest.raises(ValueError, match=f"max_num_batched_tokens {message}"):
        drafting(3, max_num_seqs=4, max_num_batched_tokens=15)
    with pytest.raises(ValueError, match=r"max_num_seqs \(2\): raise it to 8$"):  # no number of requests would help
        drafting(3, max_num_seqs=2, max_num_batched_tokens=3)
    for k, tokens in ((3, 2048), (64, 256 * 65)):  # the default
        plan = resolve_plan(drafting(k), Machine(64 << 30), environ={}, config_only=True)
        assert plan.max_num_batched_tokens == tokens


TARGET = load_model_config(embedded_model_path())


def make_config(drafter: str | Path | None = None, method: str = "", **engine: Any) -> EngineConfig:
    settings = {"num_speculative_tokens": 3, "method": method, **({} if drafter is None else {"model": str(drafter)})}
    return EngineConfig(speculative_config=settings, **engine)  # type: ignore[arg-type]


def find(config: EngineConfig) -> DrafterModel:
    found = find_drafter(config, TARGET)
    assert found is not None
    return found


def changed_head(folder: Path, **fields: Any) -> Path:
    """A copy of the embedded head's config.json with other fields."""
    content = json.loads((embedded_eagle_path() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **fields}))
    return folder


EAGLE_3 = {"architectures": ["LlamaForCausalLMEagle3"]}
SHORT = {"max_position_embeddings": 512}
CARRIED = "the package carries a head for its own model, 'story-llama', and for no other"


@pytest.mark.parametrize(
    ("fields", "engine", "message"),
    [
        (EAGLE_3, {}, "EAGLE-3 heads are not supported"),
        ({"vocab_size": 4096}, {}, "vocabulary of 4,096 tokens and the model one of 2,048"),
        ({"hidden_size": 96}, {}, "hidden_size 96 and the model has 192"),
        (SHORT, {"max_model_len": 513}, r"has 512 positions .* max_model_len 513; set max_model_len to at most 512"),
        (None, {"model": "a/model"}, f"'eagle' needs a model, and none is given; {CARRIED}"),
    ],
)
def test_heads_that_do_not_fit(fields: Any, engine: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = None if fields is None else changed_head(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        find(make_config(head, "eagle", **engine))


def test_a_head_has_its_own_method_and_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"an EAGLE head, .* set method to 'eagle'"):
        find(make_config("story-llama-eagle"))
    find(make_config(changed_head(tmp_path, **SHORT), "eagle", max_model_len=512)).check_length(512)


CONFIG = model_config("LlamaForCausalLM", 101, 48, 80, 1, 4, 2, 16, 64)
BLOCK_SIZE, NUM_DRAFTS = 8, 3


def weights(*, bias: bool = False, norm: bool = False, prefix: str = "", extra: tuple[str, ...] = ()) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"q": (64, 48), "k": (32, 48), "v": (32, 48), "o": (48, 64)}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
    layer |= {"mlp.gate_proj": (80, 48), "mlp.up_proj": (80, 48), "mlp.down_proj": (48, 80)}
    layer |= {"post_attention_layernorm": (48,), **({"input_layernorm": (48,)} if norm else {})}
    shapes = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (48, 96), **({"fc.bias": (48,)} if bias else {}), **dict.fromkeys(extra, (101, 48))}
    return {prefix + name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


@dataclass
class Target:
    """The two ends of a model, without any layers between them."""

    has_embedding: bool = True

    def __post_init__(self) -> None:
        self.table = torch.randn(101, 48, generator=torch.Generator().manual_seed(2))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert self.has_embedding
        return self.table[input_ids]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table.T


def make_drafter(folder: Path, tensors: dict[str, Any], target: Target | None = None) -> EagleDrafter:
    save_file(tensors, folder / "model.safetensors")
    context = ModelContext(cpu_kernels(), SDPABackend(), torch.float32, torch.device("cpu"))
    head = DrafterModel("eagle", "a/head", folder, CONFIG)
    drafter = EagleDrafter(DrafterContext(context, head, fusion=plan_fusion(CONFIG, "v2")))
    drafter.load_model(target or Target())  # type: ignore[arg-type]
    drafter.bind_kv_caches([torch.zeros(9, 2, 2, BLOCK_SIZE, 16)])
    return drafter


def computed_directly(tensors: dict[str, torch.Tensor], embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The head's output for one sequence ``[length, 48]``, all at once."""
    length = len(hidden)
    x = F.linear(torch.cat((embeddings, hidden), -1), tensors["fc.weight"], tensors.get("fc.bias"))
    norm = tensors.get("layers.0.input_layernorm.weight")
    normed = x if norm is None else F.rms_norm(x, (48,), norm, 1e-6)
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(8) / 8)

    def heads(name: str) -> torch.Tensor:
        return F.linear(normed, layer[f"self_attn.{name}_proj.weight"]).view(length, -1, 16).transpose(0, 1)

    def rotated(y: torch.Tensor) -> torch.Tensor:
        first, second = y[..., :8], y[..., 8:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    query, key, value = rotated(heads("q")), rotated(heads("k")), heads("v")
    attended = F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, enable_gqa=True
    ).squeeze(0)
    x = x + F.linear(attended.transpose(0, 1).flatten(1), layer["self_attn.o_proj.weight"])
    y = F.rms_norm(x, (48,), layer["post_attention_layernorm.weight"], 1e-6)
    y = F.silu(F.linear(y, layer["mlp.gate_proj.weight"])) * F.linear(y, layer["mlp.up_proj.weight"])
    return x + F.linear(y, layer["mlp.down_proj.weight"])


def drafts_computed_directly(
    tensors: dict[str, torch.Tensor], target: Target, next_ids: torch.Tensor, hidden: torch.Tensor
) -> list[int]:
    """Greedy drafts behind ``next_ids``: the sequence is computed anew for each, its own outputs appended."""
    drafts: list[int] = []
    for _ in range(NUM_DRAFTS):
        foreseen = computed_directly(tensors, target.table[next_ids], hidden)[-1:]
        drafts.append(int(target.compute_logits(foreseen).argmax()))
        next_ids = torch.cat((next_ids, torch.tensor(drafts[-1:])))
        hidden = torch.cat((hidden, foreseen))
    return drafts


def first_step(num_tokens: int, next_ids: torch.Tensor | None = None) -> DraftBatch:
    """A prompt's step: one request in blocks 3, 1, 5, 7."""
    next_ids = torch.arange(num_tokens) if next_ids is None else next_ids
    tables = torch.tensor([[3, 1, 5, 7]], dtype=torch.int32)
    positions = torch.arange(num_tokens)
    slots = tables[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts, seq_lens = torch.tensor([0, num_tokens]).int(), torch.tensor([num_tokens]).int()
    return DraftBatch(
        input_ids=next_ids,
        metadata=AttentionMetadata(starts, seq_lens, tables, slots, positions, 0, num_tokens, num_tokens),
        hidden=torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(3)),
        next_ids=next_ids,
        last_index=torch.tensor([num_tokens - 1]),
        newest=next_ids[-1:],
        positions=torch.tensor([num_tokens]),
        limits=torch.tensor([30]),
        block_tables=tables,
        rows=torch.tensor([0], dtype=torch.int32),
        temperatures=torch.zeros(1),
        seeds=torch.zeros(1, dtype=torch.int64),
        is_decode=False,
        max_seq_len=32,
    )


def written_slots(cache: torch.Tensor, before: torch.Tensor) -> list[int]:
    return (cache != before).any(dim=4).any(dim=2).any(dim=1).view(-1).nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(
    "shape",
    [{}, {"bias": True}, {"norm": True}, {"prefix": "model."}, {"bias": True, "extra": ("embed_tokens.weight",)}],
    ids=str,
)
def test_drafts_are_those_of_the_direct_computation(tmp_path: Path, shape: dict[str, Any]) -> None:
    tensors, target = weights(**shape), Target()
    drafter = make_drafter(tmp_path, tensors, target)
    batch = first_step(13, torch.randint(101, (13,), generator=torch.Generator().manual_seed(3)))
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    drafts = drafter.propose(batch, NUM_DRAFTS)
    assert drafts is not None
    assert drafts.tolist() == [drafts_computed_directly(plain, target, batch.next_ids, batch.hidden)]


def test_a_head_far_from_the_embedding_must_have_its_own(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"1 missing\n.*embed_tokens.weight"):
        make_drafter(tmp_path, weights(), Target(has_embedding=False))


def test_short_steps_read_what_the_first_pass_wrote(tmp_path: Path) -> None:
    """Another request's blocks make no difference, and a limit in the middle stops writing."""
    tensors, target = weights(), Target()
    drafter = make_drafter(tmp_path, tensors, target)
    cache = torch.randn(9, 2, 2, BLOCK_SIZE, 16)
    before = cache.clone()
    drafter.bind_kv_caches([cache])
    batch = first_step(15)
    batch.limits.fill_(16)  # the first draft's entry is the last that has room
    drafts = drafter.propose(batch, NUM_DRAFTS)
    assert drafts is not None
    assert int(drafts[0, 0]) == drafts_computed_directly(tensors, target, batch.next_ids, batch.hidden)[0]
    steps = DraftSteps(batch, BLOCK_SIZE, lambda *_, **__: torch.zeros(1))
    last = int(steps.singles(0, 1)[0].slot_mapping)
    assert written_slots(cache, before) == sorted([*batch.metadata.slot_mapping.tolist(), last])

"""The EAGLE head against the same computation written out, and the shapes that its checkpoints have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.helpers.kernels import cpu_kernels

from fleetfoot.config.model import ModelConfig
from fleetfoot.fusion import plan_fusion
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.layers.context import ModelContext
from fleetfoot.records.forward_context import AttentionMetadata
from fleetfoot.records.weights import WeightError
from fleetfoot.speculative.drafter import DraftBatch, DrafterContext, DraftSteps
from fleetfoot.speculative.eagle import EagleDrafter
from fleetfoot.speculative.find import DrafterModel

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
BLOCK_SIZE, NUM_DRAFTS = 8, 3


def weights(*, bias: bool = False, norm: bool = False, prefix: str = "", extra: tuple[str, ...] = ()) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "fc.weight": (48, 96),
        "layers.0.self_attn.q_proj.weight": (64, 48),
        "layers.0.self_attn.k_proj.weight": (32, 48),
        "layers.0.self_attn.v_proj.weight": (32, 48),
        "layers.0.self_attn.o_proj.weight": (48, 64),
        "layers.0.post_attention_layernorm.weight": (48,),
        "layers.0.mlp.gate_proj.weight": (80, 48),
        "layers.0.mlp.up_proj.weight": (80, 48),
        "layers.0.mlp.down_proj.weight": (48, 80),
        **({"fc.bias": (48,)} if bias else {}),
        **({"layers.0.input_layernorm.weight": (48,)} if norm else {}),
        **dict.fromkeys(extra, (101, 48)),
    }
    return {prefix + name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


@dataclass
class Target:
    """The two ends of a model, without any layers between them."""

    has_embedding: bool = True
    table: torch.Tensor = field(
        default_factory=lambda: torch.randn(101, 48, generator=torch.Generator().manual_seed(2))
    )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert self.has_embedding
        return self.table[input_ids]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table.T


def make_drafter(folder: Path, tensors: dict[str, Any], target: Target | None = None) -> EagleDrafter:
    save_file(tensors, folder / "model.safetensors")
    context = ModelContext(cpu_kernels(), SDPABackend(), torch.float32, torch.device("cpu"))
    head = DrafterModel("eagle", "a/head", folder, CONFIG)
    drafter = EagleDrafter(DrafterContext(NUM_DRAFTS, context, head, fusion=plan_fusion(CONFIG, "v2")))
    drafter.load_model(target or Target())  # type: ignore[arg-type]
    drafter.bind_kv_caches([torch.zeros(9, 2, 2, BLOCK_SIZE, 16)])
    return drafter


def written_out(tensors: dict[str, torch.Tensor], embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
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


def drafts_written_out(
    tensors: dict[str, torch.Tensor], target: Target, next_ids: torch.Tensor, hidden: torch.Tensor
) -> list[int]:
    """Greedy drafts behind ``next_ids``: the sequence is computed anew for each, its own outputs appended."""
    drafts: list[int] = []
    for _ in range(NUM_DRAFTS):
        foreseen = written_out(tensors, target.table[next_ids], hidden)[-1:]
        drafts.append(int(target.compute_logits(foreseen).argmax()))
        next_ids = torch.cat((next_ids, torch.tensor(drafts[-1:])))
        hidden = torch.cat((hidden, foreseen))
    return drafts


def first_step(num_tokens: int, next_ids: torch.Tensor, hidden: torch.Tensor) -> DraftBatch:
    """A prompt's step: one request in blocks 3, 1, 5, 7."""
    tables = torch.tensor([[3, 1, 5, 7]], dtype=torch.int32)
    positions = torch.arange(num_tokens)
    slots = tables[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts, seq_lens = torch.tensor([0, num_tokens]).int(), torch.tensor([num_tokens]).int()
    return DraftBatch(
        input_ids=next_ids,
        metadata=AttentionMetadata(starts, seq_lens, tables, slots, positions, 0, num_tokens, num_tokens),
        hidden=hidden,
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


@pytest.mark.parametrize(
    "shape",
    [{}, {"bias": True}, {"norm": True}, {"prefix": "model."}, {"bias": True, "extra": ("embed_tokens.weight",)}],
    ids=str,
)
def test_drafts_are_those_of_the_computation_written_out(tmp_path: Path, shape: dict[str, Any]) -> None:
    tensors, target = weights(**shape), Target()
    drafter = make_drafter(tmp_path, tensors, target)
    generator = torch.Generator().manual_seed(3)
    num_tokens = 13
    next_ids = torch.randint(101, (num_tokens,), generator=generator)
    hidden = torch.randn(num_tokens, 48, generator=generator)
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    drafts = drafter.propose(first_step(num_tokens, next_ids, hidden), NUM_DRAFTS)
    assert drafts is not None
    assert drafts.tolist() == [drafts_written_out(plain, target, next_ids, hidden)]


def test_without_drafts_the_cache_is_filled_all_the_same(tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path, weights())
    cache = torch.zeros(9, 2, 2, BLOCK_SIZE, 16)
    drafter.bind_kv_caches([cache])
    batch = first_step(13, torch.arange(13), torch.randn(13, 48))
    assert drafter.propose(batch, 0) is None
    written = cache.abs().sum(dim=(1, 2, 4)).view(-1) > 0
    assert written.nonzero().squeeze(1).tolist() == sorted(batch.metadata.slot_mapping.tolist())


def test_a_head_far_from_the_embedding_reads_its_own(tmp_path: Path) -> None:
    tensors = weights(extra=("embed_tokens.weight",))
    drafter = make_drafter(tmp_path, tensors, Target(has_embedding=False))
    batch = first_step(5, torch.arange(5), torch.randn(5, 48))
    target = Target(table=Target().table)
    drafts = drafter.propose(batch, 1)
    foreseen = written_out(tensors, tensors["embed_tokens.weight"][batch.next_ids], batch.hidden)[-1]
    assert drafts is not None
    assert drafts.tolist() == [[int(target.compute_logits(foreseen).argmax())]]


def test_a_head_far_from_the_embedding_must_have_its_own(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"1 missing\n.*embed_tokens.weight"):
        make_drafter(tmp_path, weights(), Target(has_embedding=False))


def test_a_checkpoint_that_is_no_head(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["fc.weight"]
    with pytest.raises(WeightError, match=r"the EAGLE head 'a/head' in .* has no tensor fc.weight"):
        make_drafter(tmp_path, tensors)


def test_short_steps_read_what_the_first_pass_wrote(tmp_path: Path) -> None:
    """Another request's blocks make no difference, and a limit in the middle stops writing."""
    tensors, target = weights(), Target()
    drafter = make_drafter(tmp_path, tensors, target)
    cache = torch.randn(9, 2, 2, BLOCK_SIZE, 16)
    before = cache.clone()
    drafter.bind_kv_caches([cache])
    batch = first_step(15, torch.arange(15), torch.randn(15, 48))
    batch.limits.fill_(16)  # the first draft's entry is the last that has room
    drafts = drafter.propose(batch, NUM_DRAFTS)
    assert drafts is not None
    assert int(drafts[0, 0]) == drafts_written_out(tensors, target, batch.next_ids, batch.hidden)[0]
    changed = (cache != before).any(dim=4).any(dim=2).any(dim=1).view(-1).nonzero().squeeze(1).tolist()
    steps = DraftSteps(batch, BLOCK_SIZE, lambda *_, **__: torch.zeros(1))
    last = int(steps.singles(0, 1)[0].slot_mapping)
    assert changed == sorted([*batch.metadata.slot_mapping.tolist(), last])

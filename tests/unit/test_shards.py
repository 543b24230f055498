"""How a model is cut over ranks: every head, column, token and layer is somewhere, and what does not fit is refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfoot.config import sharding
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import pipeline_layers

LLAMA_8B = ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 131072, dtype="bfloat16")


def members(span: slice) -> range:
    return range(span.start, span.stop)


def shape(heads: int, kv_heads: int, intermediate: int = 96, layers: int = 4, vocab: int = 64) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", vocab, 32, intermediate, layers, heads, kv_heads, 8, 64)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 4, 2), (8, 2, 4), (8, 1, 8), (6, 2, 2), (12, 4, 4)])
def test_query_heads_find_their_kv_heads_on_their_rank(heads: int, kv_heads: int, size: int) -> None:
    config = shape(heads, kv_heads)
    sharding.check_tensor_parallel_size(config, size)
    seen: list[int] = []
    for rank in range(size):
        mine = members(sharding.even_span(heads, rank, size))
        shared = members(sharding.kv_head_span(config, rank, size))
        seen += mine
        assert len(shared) == sharding.num_kv_heads(config, size)
        for place, head in enumerate(mine):  # attention pairs heads by their places on the rank
            assert shared[place * len(shared) // len(mine)] == head * kv_heads // heads
    assert seen == list(range(heads))


NEITHER = "4 KV heads can neither be shared evenly nor be copied to equally many ranks each; .*: 1, 2, 4"


@pytest.mark.parametrize(
    ("what", "config", "size", "message"),
    [
        ("tensor", shape(6, 2), 4, "_size is 4, but 6 attention heads cannot be shared evenly; .*: 1, 2, 6$"),
        ("tensor", shape(12, 4), 6, NEITHER),
        ("tensor", shape(8, 8, intermediate=100), 8, "an intermediate_size of 100 cannot be shared evenly.*: 1, 2, 4$"),
        ("pipeline", shape(2, 2), 5, "_size is 5, but .* has 4 layers to spread; .* at most 4"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(what: str, config: ModelConfig, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{what}_parallel.*{message}"):
        getattr(sharding, f"check_{what}_parallel_size")(config, size)


@given(vocab_size=st.integers(1, 5000), size=st.integers(1, 9))
def test_every_token_is_on_one_rank(vocab_size: int, size: int) -> None:
    rows = sharding.vocab_rows(vocab_size, size)
    spans = [members(sharding.vocab_span(vocab_size, rank, size)) for rank in range(size)]
    assert [token for span in spans for token in span] == list(range(vocab_size))
    for rank, span in enumerate(spans):
        assert len(span) <= rows
        assert not span or span.start == rank * rows  # where gathered logits have them
    assert rows * size - vocab_size < (16 * size if size > 1 else 1)


@given(layers=st.integers(1, 80), vocab=st.sampled_from([64, 2048, 100_000]), data=st.data())
def test_every_layer_is_on_one_rank(layers: int, vocab: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, layers))
    config = shape(4, 2, layers=layers, vocab=vocab)
    sharding.check_pipeline_parallel_size(config, size)
    spans = [pipeline_layers(config, rank, size) for rank in range(size)]
    assert [layer for span in spans for layer in span] == list(range(layers))
    lengths = [len(span) for span in spans]
    assert min(lengths) >= 1
    assert max(lengths[:-1], default=0) - min(lengths[:-1], default=0) <= 1
    assert lengths[:-1] == sorted(lengths[:-1])
    # the last rank has fewer layers than the others only as far as its logits head makes up for them
    head = vocab * config.hidden_size / config.layer_parameters()
    assert max(lengths[:-1], default=0) - lengths[-1] <= head + 1


def test_the_logits_head_counts_as_layers() -> None:
    assert [len(pipeline_layers(LLAMA_8B, rank, 2)) for rank in range(2)] == [17, 15]  # it is as large as 2.4 layers
    small = dataclasses.replace(LLAMA_8B, vocab_size=1000)
    assert [len(pipeline_layers(small, rank, 2)) for rank in range(2)] == [16, 16]
    assert [len(pipeline_layers(small, rank, 3)) for rank in range(3)] == [11, 11, 10]


def test_parameters_of_a_layer() -> None:
    hidden = 4096
    whole = 2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * 14336 + 2 * hidden
    assert LLAMA_8B.layer_parameters() == whole
    assert LLAMA_8B.layer_parameters(2) == (whole - 2 * hidden) // 2 + 2 * hidden
    assert LLAMA_8B.layer_parameters(16) == (whole - 2 * hidden - 2 * hidden * 1024) // 16 + 2 * hidden * (1 + 128)

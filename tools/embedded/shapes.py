"""The shapes of the embedded models.

`story-llama` is the model in the package. The others are for tests: a second and a third architecture, each with the
feature that sets it apart, and a draft model for the first.
"""

from dataclasses import dataclass
from typing import Any

from tokenizer import MAX_LENGTH, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """One model.

    Attributes:
        architecture: "Llama", "Qwen3" or "Mistral": the prefix of the `transformers` classes.
        folder: where its checkpoint lives in the repository.
        max_bytes: the most that the folder may weigh.
        learning_rate: the peak learning rate.
        config: keywords of the `transformers` config class.
    """

    architecture: str
    folder: str
    max_bytes: int
    learning_rate: float
    config: dict[str, Any]


def _dims(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, tied: bool = True
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "attention_dropout": 0.0,
    }


SHAPES = {
    "story-llama": Shape("Llama", "src/fleetfoot/assets/story-llama", 8_000_000, 3e-3, _dims(192, 8, 6, 2, 32, 512)),
    # 4 heads of 32 are wider than the hidden size, as in the real Qwen3 models.
    "story-qwen3": Shape("Qwen3", "tests/assets/story-qwen3", 2_000_000, 4e-3, _dims(96, 6, 4, 2, 32, 256)),
    # The window is shorter than a story, so that tests cross it; six layers let news travel 192 tokens.
    "story-mistral": Shape(
        "Mistral",
        "tests/assets/story-mistral",
        2_000_000,
        4e-3,
        {**_dims(96, 6, 3, 1, 32, 192, tied=False), "sliding_window": 32},
    ),
    "story-draft": Shape("Llama", "tests/assets/story-draft", 600_000, 6e-3, _dims(64, 2, 2, 1, 32, 128)),
}

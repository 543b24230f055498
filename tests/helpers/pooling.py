"""Tiny checkpoints of models for pooling."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from fleetfoot.assets import embedded_model_path

SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": 0,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "num_gpu_blocks_override": 128,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(1, 100, (size,), generator=GENERATOR).tolist() for size in (1, 3, 17, 40, 8)]
TEXTS = ["Hello there", "the old cat is by the sea", "one"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}{% endfor %}"
PAIR = "<|user|>{{ messages[0].content }} or {{ messages[1].content }}?"


def save(folder: Path, kind: str, cls: Any, **more: Any) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SHAPE | more)
    model = cls.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return model


def save_with_tokenizer(
    folder: Path, kind: str, cls: Any, template: str | None = None, tokens: tuple[str, ...] = (), **more: Any
) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)
    return save(folder, kind, cls, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **more)


def save_reward_model(folder: Path, name: str, num_labels: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """With a tokenizer. Returns the body, and the tensors of the head."""
    model = save_with_tokenizer(folder, "qwen2", AutoModel)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    head = {f"score.{layer}.{part}": torch.randn(*shape, generator=GENERATOR) for layer, part, shape in (
        (0, "weight", (48, 48)), (0, "bias", (48,)), (2, "weight", (num_labels, 48)), (2, "bias", (num_labels,))
    )}  # fmt: skip
    body = {f"model.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    save_file(body | head, folder / "model.safetensors", metadata={"format": "pt"})
    return model, head


def with_modules(folder: Path, mode: str, *, normalize: bool) -> None:
    """The files of earlier releases of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in zip(paths, kinds, strict=False)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def ids(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def states(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0]

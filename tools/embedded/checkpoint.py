"""Writes the embedded models in Hugging Face's format, and packs the results of a run."""

import shutil
import tarfile
from pathlib import Path
from typing import Any

import tokenizer
import torch
import transformers
from shapes import Shape
from story_chat import BEGIN, END, PAD
from tokenizers import Tokenizer


def token_ids(tokenizer_folder: Path) -> dict[str, int]:
    """The ids of the begin, end and pad tokens, under the names that a config gives them."""
    vocabulary = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).get_vocab()
    return {"bos_token_id": vocabulary[BEGIN], "eos_token_id": vocabulary[END], "pad_token_id": vocabulary[PAD]}


def new_model(shape: Shape, special_ids: dict[str, int]) -> Any:
    """A `transformers` model of this shape with fresh float32 weights."""
    config = getattr(transformers, f"{shape.architecture}Config")(**shape.config, **special_ids)
    return getattr(transformers, f"{shape.architecture}ForCausalLM")(config)


def save_checkpoint(model: Any, special_ids: dict[str, int], tokenizer_folder: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(**special_ids)
    model.to(device="cpu", dtype=torch.bfloat16).save_pretrained(folder)
    for name in tokenizer.FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)
    for path in folder.iterdir():
        path.chmod(0o644)  # save_pretrained lets only the owner read the weights


def check_size(shape: Shape, folder: Path) -> int:
    """The folder's weight in bytes.

    Raises:
        ValueError: it weighs more than the shape allows.
    """
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > shape.max_bytes:
        raise ValueError(f"{folder} weighs {size} bytes, and at most {shape.max_bytes} are allowed")
    return size


def pack(folder: Path, names: list[str]) -> Path:
    """Put the named folders within `folder` into `folder`/embedded.tar.gz."""
    archive = folder / "embedded.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            tar.add(folder / name, arcname=name)
    return archive

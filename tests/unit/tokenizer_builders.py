"""Small tokenizers of each kind, built from a few lines of text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Once upon a time, a little fox lived in the quiet wood.",
    "She said: \"Don't run!\" and the rabbit didn't run.",
    "Grüße aus Köln, çok güzel, 你好世界, こんにちは, привет мир 😀🎉 café naïve",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
    "  two  spaces   three    four\tand a tab",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_backend() -> Tokenizer:
    """Byte-level BPE with BOS from a post-processor, special tokens, and an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("a spaced token")])
    tokenizer.post_processor = _bos_processor(tokenizer, "<|begin|>")
    return tokenizer


def byte_fallback_backend(strip_left: bool = True) -> Tokenizer:
    """BPE with byte fallback in the way of Llama 2 and Mistral: spaces are "▁", rare characters are bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii_corpus = [line for line in CORPUS if line.isascii()]
    trained.train_from_iterator(ascii_corpus, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip_left else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = _bos_processor(tokenizer, "<s>")
    return tokenizer


def metaspace_backend() -> Tokenizer:
    """A Unigram model with the Metaspace decoder, which drops the space of a text's first token."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((f"▁{w}", -2.0) for w in ("the", "fox", "runs")), ("▁", -4.0)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((c, -5.0) for c in "abcdefghijklmnopqrstuvwxyzé😀")], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_level_backend() -> Tokenizer:
    """Whole words and no decoder: a decode joins the tokens with spaces."""
    words = ["<unk>", "the", "fox", "runs", "café", "."]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<a>", "<b>"])
    return tokenizer


BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level_backend,
    "byte_fallback": byte_fallback_backend,
    "metaspace": metaspace_backend,
    "word_level": word_level_backend,
}


def save(backend: Tokenizer, folder: Path, **config: Any) -> Path:
    """Writes a checkpoint's tokenizer files; `config` is the content of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _bos_processor(tokenizer: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos}:0 $A:0", special_tokens=[(bos, tokenizer.token_to_id(bos))])

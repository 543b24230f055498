"""Reads the files of a tokenizer, and merges them in transformers' order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"

# A token in a config file: a string, or a dict with "content" and matching flags.
TokenSpec = str | Mapping[str, Any]

_MAX_NAMES_LISTED = 20


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a checkpoint's tokenizer files."""

    tokenizer_json: Path
    """The `tokenizers` library's own file: vocabulary, merges, pre-tokenizer, post-processor, decoder."""
    special_tokens: dict[str, TokenSpec] = field(default_factory=dict)
    """Named special tokens: `bos_token`, `eos_token`, `pad_token`, ... and the model's own `*_token` entries."""
    extra_special_tokens: list[TokenSpec] = field(default_factory=list)
    """Special tokens without a name."""
    added_tokens: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """`added_tokens_decoder` of tokenizer_config.json: token id -> content and flags."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja sources by name; the unnamed template is called "default"."""
    settings: dict[str, Any] = field(default_factory=dict)
    """All of tokenizer_config.json."""


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Read the tokenizer files of a folder, or a tokenizer.json and the files beside it.

    Raises:
        FileNotFoundError: There is no tokenizer.json; the message lists the files that were found and what would work.
        ValueError: A file is not valid JSON.
    """
    tokenizer_json = _find_tokenizer_json(Path(path))
    folder = tokenizer_json.parent
    settings = _read_json_object(folder / TOKENIZER_CONFIG_FILE)
    tokens = dict(settings)
    if "added_tokens_decoder" not in settings:
        # special_tokens_map.json is the older format; a config with added_tokens_decoder includes its contents.
        tokens.update(_read_json_object(folder / SPECIAL_TOKENS_MAP_FILE))
    extra = tokens.get("extra_special_tokens") or tokens.get("additional_special_tokens") or []
    named = {name: value for name, value in tokens.items() if name.endswith("_token") and _is_token_spec(value)}
    if isinstance(extra, Mapping):
        named.update({name: value for name, value in extra.items() if _is_token_spec(value)})
        extra = []
    if not isinstance(extra, list) or not all(map(_is_token_spec, extra)):
        raise ValueError(
            f"extra_special_tokens of the tokenizer in {folder} is {extra!r}; a list of tokens is expected"
        )
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        special_tokens=named,
        extra_special_tokens=extra,
        added_tokens=_read_added_tokens(folder, settings.get("added_tokens_decoder", {})),
        chat_templates=_read_chat_templates(folder, settings.get("chat_template")),
        settings=settings,
    )


def token_content(spec: TokenSpec) -> str:
    """The token's string."""
    return spec if isinstance(spec, str) else spec["content"]


def _is_token_spec(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))


def _find_tokenizer_json(path: Path) -> Path:
    if path.is_file() and path.suffix == ".json":
        return path
    if path.is_dir() and (path / TOKENIZER_FILE).is_file():
        return path / TOKENIZER_FILE
    if path.is_dir():
        found = _list_names(path)
    elif path.exists():
        found = "it is a file of another kind"
    else:
        found = "there is no such file or folder"
    raise FileNotFoundError(
        f"no {TOKENIZER_FILE} in tokenizer={str(path)!r} ({found}). Only tokenizers in the {TOKENIZER_FILE} format are "
        f"supported. Pass a folder that holds one with tokenizer=FOLDER, write one with transformers' "
        f"AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), or pass skip_tokenizer_init=True to run on "
        f"token ids alone."
    )


def _list_names(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - _MAX_NAMES_LISTED} more" if len(names) > _MAX_NAMES_LISTED else ""
    return f"the folder holds {', '.join(names[:_MAX_NAMES_LISTED])}{more}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; an object is expected")
    return value


def _read_added_tokens(folder: Path, configured: object) -> dict[int, Mapping[str, Any]]:
    if not isinstance(configured, Mapping) or not all(
        str(token_id).isdecimal() and isinstance(spec, Mapping) and _is_token_spec(spec)
        for token_id, spec in configured.items()
    ):
        raise ValueError(
            f"added_tokens_decoder in {folder / TOKENIZER_CONFIG_FILE} must map token ids to "
            f'{{"content": ..., "special": ...}} objects'
        )
    return {int(token_id): spec for token_id, spec in configured.items()}


def _read_chat_templates(folder: Path, configured: object) -> dict[str, str]:
    """Chat templates by name. Template files override the `chat_template` entry of tokenizer_config.json."""
    templates = {}
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        templates["default"] = _read_text(folder / CHAT_TEMPLATE_FILE)
    for path in sorted((folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja")):
        templates[path.name.removesuffix(".jinja")] = _read_text(path)
    if templates or configured is None:
        return templates
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, Mapping):
        return dict(configured)
    if isinstance(configured, list) and all(
        isinstance(t, Mapping) and {"name", "template"} <= t.keys() for t in configured
    ):
        return {template["name"]: template["template"] for template in configured}
    raise ValueError(
        f"chat_template in {folder / TOKENIZER_CONFIG_FILE} is a {type(configured).__name__}; a Jinja string or a list "
        f'of {{"name": ..., "template": ...}} objects is expected'
    )

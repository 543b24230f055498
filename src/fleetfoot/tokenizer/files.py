"""The files of a checkpoint's tokenizer, merged in transformers' order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import BPE

from fleetfoot.config.json_fields import read_json_object

logger = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_CHAT_TEMPLATE_FILE = "chat_template.jinja"
_CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
_MAX_NAMES_LISTED = 20

# A token in a config file: a string, or a dict with "content" and matching flags.
TokenSpec = str | Mapping[str, Any]


def read_tokenizer_files(path: Path) -> dict[str, Any]:
    """The arguments of `Tokenizer`, from a folder, or a tokenizer.json with the files beside it. Raises as
    `Tokenizer.from_path`."""
    path = _find_tokenizer_json(path)
    folder = path.parent
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ValueError(f"{path} is not a file of the tokenizers library: {error}") from error
    settings = _read_json_object(folder / _CONFIG_FILE)
    named, extra = _read_special_tokens(folder, settings)
    added = _read_added_tokens(folder, settings.get("added_tokens_decoder", {}))
    _add_configured_tokens(backend, added, [*named.values(), *extra])
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    # settings that would change ids or text, and are not supported
    if settings.get("clean_up_tokenization_spaces") and not isinstance(backend.model, BPE):
        logger.warning("clean_up_tokenization_spaces of %s is not applied: tokens keep their spaces", path)
    ids = backend.encode("a").ids if settings.get("add_bos_token") or settings.get("add_eos_token") else []
    for name, position, place in (("bos_token", 0, "before"), ("eos_token", -1, "after")):
        if (
            settings.get(f"add_{name}")
            and name in named
            and ids[position:][:1] != [backend.token_to_id(_content(named[name]))]
        ):
            logger.warning("add_%s of %s has no effect: tokenizer.json adds no %s %s a text", name, path, name, place)
    if settings.get("fix_mistral_regex"):
        logger.warning("fix_mistral_regex of %s is not applied; save the tokenizer with it", path)
    return {
        "backend": backend,
        "special_tokens": {name: _content(spec) for name, spec in named.items()},
        "extra_special_tokens": [_content(spec) for spec in extra],
        "chat_templates": _read_chat_templates(folder, settings.get("chat_template")),
        "settings": settings,
    }


def read_end_token(path: Path) -> int | None:
    """The id of a tokenizer's ``eos_token``, without loading the tokenizer; None: it names none, or has no such token.
    Raises ValueError: a file is invalid."""
    file = path / _TOKENIZER_FILE if path.is_dir() else path
    settings = _read_json_object(file.parent / _CONFIG_FILE)
    named, _ = _read_special_tokens(file.parent, settings)
    if "eos_token" not in named:
        return None
    content = _content(named["eos_token"])
    added = _read_added_tokens(file.parent, settings.get("added_tokens_decoder", {}))
    ids = {_content(spec): token_id for token_id, spec in added.items()}
    if content not in ids:  # a large file
        found = _read_json_object(file)
        vocab = found.get("model", {}).get("vocab", {})
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
        ids |= {token["content"]: token["id"] for token in found.get("added_tokens") or ()}
    return ids.get(content)


def tokenizer_digest(path: Path) -> str:
    """16 hex digits over the files that `read_tokenizer_files` reads, chat templates included."""
    path = _find_tokenizer_json(path)
    names = _CONFIG_FILE, _SPECIAL_TOKENS_FILE, _CHAT_TEMPLATE_FILE
    others = [path.parent / name for name in names] + sorted((path.parent / _CHAT_TEMPLATE_FOLDER).glob("*.jinja"))
    digest = hashlib.blake2b(digest_size=8)
    for file in (path, *filter(Path.is_file, others)):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _find_tokenizer_json(path: Path) -> Path:
    if path.is_file() and path.suffix == ".json":
        return path
    if path.is_dir() and (path / _TOKENIZER_FILE).is_file():
        return path / _TOKENIZER_FILE
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        num_more = len(names) - _MAX_NAMES_LISTED
        more = f" and {num_more} more" if num_more > 0 else ""
        found = f"the folder holds {', '.join(names[:_MAX_NAMES_LISTED])}{more}" if names else "the folder is empty"
    else:
        found = "it is a file of another kind" if path.exists() else "there is no such file or folder"
    raise FileNotFoundError(
        f"no tokenizer.json in tokenizer={str(path)!r} ({found}). Only tokenizers in the tokenizer.json format are "
        "supported. Pass a folder that holds one with tokenizer=FOLDER, write one with transformers' "
        "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), or pass skip_tokenizer_init=True to run on "
        "token ids alone."
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one when there is no such file."""
    return read_json_object(path, ValueError) if path.is_file() else {}


def _read_special_tokens(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, TokenSpec], list[TokenSpec]]:
    """Named special tokens (``bos_token`` and the model's own ``*_token`` entries), and those without a name."""
    tokens = dict(settings)
    if "added_tokens_decoder" not in settings:
        # special_tokens_map.json is the older format; a config with added_tokens_decoder includes its contents.
        tokens.update(_read_json_object(folder / _SPECIAL_TOKENS_FILE))
    extra = tokens.get("extra_special_tokens") or tokens.get("additional_special_tokens") or []
    named = {name: value for name, value in tokens.items() if name.endswith("_token") and _is_token_spec(value)}
    if isinstance(extra, Mapping):
        named.update({name: value for name, value in extra.items() if _is_token_spec(value)})
        extra = []
    if not isinstance(extra, list) or not all(map(_is_token_spec, extra)):
        raise ValueError(
            f"extra_special_tokens of the tokenizer in {folder} is {extra!r}; a list of tokens is expected"
        )
    return named, extra


def _is_token_spec(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))


def _read_added_tokens(folder: Path, configured: object) -> dict[int, Mapping[str, Any]]:
    if not isinstance(configured, Mapping) or not all(
        str(token_id).isdecimal() and isinstance(spec, Mapping) and _is_token_spec(spec)
        for token_id, spec in configured.items()
    ):
        raise ValueError(
            f"added_tokens_decoder in {folder / _CONFIG_FILE} must map token ids to "
            f'{{"content": ..., "special": ...}} objects'
        )
    return {int(token_id): spec for token_id, spec in configured.items()}


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, added: Mapping[int, Mapping[str, Any]], special: Sequence[TokenSpec]
) -> None:
    """Add the tokens of the config files that tokenizer.json lacks, in transformers' order.

    Args:
        added: ``added_tokens_decoder``: token id -> content and flags, which override those in tokenizer.json.
        special: special tokens.
    """
    tokens = [tokenizers.AddedToken(**dict(spec)) for _, spec in sorted(added.items())]
    contents = {token.content for token in [*backend.get_added_tokens_decoder().values(), *tokens]}
    for spec in special:
        if _content(spec) not in contents:
            contents.add(_content(spec))
            flags = {} if isinstance(spec, str) else dict(spec)
            for name in ("content", "special", "__type"):
                flags.pop(name, None)
            tokens.append(tokenizers.AddedToken(_content(spec), special=True, **flags))
    backend.add_tokens(tokens)


def _content(spec: TokenSpec) -> str:
    """The token's string."""
    return spec if isinstance(spec, str) else spec["content"]


def _read_chat_templates(folder: Path, configured: object) -> dict[str, str]:
    """Chat templates by name. Template files override the `chat_template` entry of tokenizer_config.json."""
    templates = {}
    if (folder / _CHAT_TEMPLATE_FILE).is_file():
        templates["default"] = _read_text(folder / _CHAT_TEMPLATE_FILE)
    for path in sorted((folder / _CHAT_TEMPLATE_FOLDER).glob("*.jinja")):
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
        f"chat_template in {folder / _CONFIG_FILE} is a {type(configured).__name__}; a Jinja string or a list "
        f'of {{"name": ..., "template": ...}} objects is expected'
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error

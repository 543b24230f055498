"""Text to token ids and back, from a checkpoint's tokenizer files, which are merged in transformers' order."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import tokenizers

from fleetfoot.tokenizer.detokenizer import TokenPieces

if TYPE_CHECKING:
    from fleetfoot.tokenizer.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_CHAT_TEMPLATE_FILE = "chat_template.jinja"
_CHAT_TEMPLATE_FOLDER = "additional_chat_templates"

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token")

# A token in a config file: a string, or a dict with "content" and matching flags.
TokenSpec = str | Mapping[str, Any]

_MAX_NAMES_LISTED = 20
_MAX_COMPILED_TEMPLATES = 16  # bounded, because requests can have templates of their own


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with its special tokens and chat templates.

    Ids and texts are those of transformers' fast tokenizers on the same files. In particular the post-processor in
    tokenizer.json alone decides which special tokens `encode` adds: `add_bos_token` and `add_eos_token` of
    tokenizer_config.json have no effect beside a tokenizer.json.

    Args:
        backend: The tokenizer. It is shared by all requests and must not be changed afterwards.
        special_tokens: Name -> token, `{"bos_token": "<s>", ...}`. Chat templates see them under these names.
        extra_special_tokens: Special tokens without a name.
        chat_templates: Name -> Jinja source; the template that is used without a name is called "default".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        extra_special_tokens: Sequence[str] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        # A file may have truncation and padding settings from training; a prompt must never be truncated silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        """The number of tokens, added tokens included."""
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.pieces = TokenPieces(backend)
        self.bos_token, self.eos_token, self.pad_token = map(self.special_tokens.get, _NAMED_TOKENS)
        """The tokens that begin a text, end it, and fill up a batch; each may be None."""
        ids = {name: backend.token_to_id(token) for name, token in self.special_tokens.items()}
        self.bos_token_id, self.eos_token_id, self.pad_token_id = map(ids.get, _NAMED_TOKENS)
        extra_ids = map(backend.token_to_id, extra_special_tokens)
        named_ids = {token_id for token_id in [*ids.values(), *extra_ids] if token_id is not None}
        self.all_special_ids = self.pieces.skipped_ids | named_ids
        self._compile = functools.lru_cache(_MAX_COMPILED_TEMPLATES)(_compile_chat_template)

    @classmethod
    def from_path(cls, folder_or_file: str | Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder, or a tokenizer.json with the files beside it.

        Raises:
            FileNotFoundError: There is no tokenizer.json; the message lists what was found and what would work.
            ValueError: A file is invalid.
        """
        path = _find_tokenizer_json(Path(folder_or_file))
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
        # two settings that would change ids or text, and are not supported
        if settings.get("clean_up_tokenization_spaces") and not isinstance(backend.model, tokenizers.models.BPE):
            logger.warning("clean_up_tokenization_spaces of %s is not applied: tokens keep their spaces", path)
        if settings.get("fix_mistral_regex"):
            logger.warning("fix_mistral_regex of %s is not applied; save the tokenizer with it", path)
        return cls(
            backend,
            special_tokens={name: _content(spec) for name, spec in named.items()},
            extra_special_tokens=[_content(spec) for spec in extra],
            chat_templates=_read_chat_templates(folder, settings.get("chat_template")),
        )

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as it stands in the vocabulary, or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as it stands in the vocabulary ("Ġhello"), or None for an id that has none."""
        return self.backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text. Special tokens that are spelled out in it are recognised.
            add_special_tokens: Whether the post-processor adds its tokens, BOS for instance.

        Raises:
            TypeError: `text` is not a str.
            ValueError: `text` has no UTF-8 form.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # the library's error for a str that is not valid Unicode
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"the text has a lone surrogate {text[error.start]!a} at position {error.start} and so no UTF-8 "
                    f"form; remove it, or decode the text's source with errors='replace'"
                ) from None
            raise

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Unknown ids have no text."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """The text of one token by itself; bytes that are not valid UTF-8 become U+FFFD.

        A leading space is kept, except by decoders that do not work token by token (see `detokenizer.py`). The text of
        a special token is its name, that of an unknown id is empty.
        """
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; b"" for an unknown id."""
        pieces = self.pieces
        piece = pieces.decode_window([token_id]) if pieces.decoder is None else pieces.tables[False][token_id]
        return piece if isinstance(piece, bytes) else piece.encode()

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """``{"input_ids": ...}``, as transformers' tokenizers return."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[True], **kwargs: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False] = False, **kwargs: Any
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """Render a conversation as a prompt, in the format of the model's training.

        Args:
            messages: `{"role": ..., "content": ...}` dicts; content is a str or a list of
                `{"type": "text", "text": ...}` parts.
            tokenize: Whether to return token ids instead of text. The template writes BOS itself; none is added.
            add_generation_prompt: Whether the prompt ends with the beginning of an assistant message.
            tools: JSON schemas of the tools that the model may call.
            documents: `{"title": ..., "text": ...}` dicts for templates that take them.
            continue_final_message: Whether the prompt ends within the last message, so that the model continues it.
                Needs add_generation_prompt=False.
            chat_template: A Jinja template, or the name of one of the tokenizer's. By default "tool_use" if there are
                tools and the tokenizer has a template of this name, else "default".
            **kwargs: More variables for the template, `enable_thinking=False` for instance.

        Raises:
            ValueError: There is no template, it is invalid or refuses the messages, or the messages are malformed. The
                error names the cause and the place.
        """
        template = self._compile(self._select_chat_template(chat_template, with_tools=tools is not None))
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def apply_chat_template_ids(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of `apply_chat_template(messages, **kwargs)`. The template writes BOS itself; none is added."""
        return self.apply_chat_template(messages, tokenize=True, **kwargs)

    def _select_chat_template(self, chat_template: str | None, with_tools: bool) -> str:
        templates = self.chat_templates
        names = f"the tokenizer has {sorted(templates) if templates else 'none'}"
        default = "tool_use" if with_tools and "tool_use" in templates else "default"
        name = default if chat_template is None else chat_template
        if name in templates:
            return templates[name]
        if chat_template is None:
            raise ValueError(
                f"there is no default chat template ({names}). Pass chat_template= with a Jinja template or one of the "
                f"names, or render the conversation yourself and pass it as a prompt."
            )
        if "{" not in chat_template:
            raise ValueError(
                f"chat_template={chat_template!r} is neither a Jinja template nor the name of one ({names})"
            )
        return chat_template


def _compile_chat_template(source: str) -> ChatTemplate:
    from fleetfoot.tokenizer.chat_template import ChatTemplate  # imports jinja2

    return ChatTemplate(source)


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


def _content(spec: TokenSpec) -> str:
    """The token's string."""
    return spec if isinstance(spec, str) else spec["content"]


def _is_token_spec(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))


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
            f"added_tokens_decoder in {folder / _CONFIG_FILE} must map token ids to "
            f'{{"content": ..., "special": ...}} objects'
        )
    return {int(token_id): spec for token_id, spec in configured.items()}


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

"""Text to token ids and back."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from fleetfoot.tokenizer.batch_encoding import MOST_TOKENS, PADDING, TRUNCATION, BatchEncoding, as_columns, pad
from fleetfoot.tokenizer.cutting import TextCutter, check_uncut, text_cutter
from fleetfoot.tokenizer.detokenizer import TokenPieces
from fleetfoot.tokenizer.files import read_tokenizer_files
from fleetfoot.utils.validation import FieldError, FieldTypeError

if TYPE_CHECKING:
    from fleetfoot.tokenizer.chat_template import ChatTemplate

_LONG = 4096
"""Characters, or tokens."""
_LONG_IN_PARTS, _MANY = 1 << 17, 1 << 15
"""Characters of a text that is encoded in parts, and tokens that are decoded so."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INPUTS = ("text_target", "text_pair_target", "split_special_tokens", "is_split_into_words")
_RESULTS = ("return_overflowing_tokens", "return_assistant_tokens_mask", "sanitize_control_tokens")
_UNSUPPORTED = dict.fromkeys((*_INPUTS, *_RESULTS, "clean_up_tokenization_spaces")) | {"stride": 0, "verbose": True}
"""transformers' arguments that are refused, except with these values, None or False, which change nothing."""

_SPACE_MARK = '{"type":"Replace","pattern":{"String":" "},"content":"▁"}'
_KEEPS_LENGTH = {"Sequence", "ByteLevel", "Metaspace", "Digits", "Prepend", "NFC", "NFD", "Lowercase", "Split"}
_MOST_COMPOSED = 4  # code points that NFC makes one
_MAX_COMPILED_TEMPLATES = 16  # bounded, because requests can have templates of their own


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with its special tokens and chat templates.

    Methods, defaults, ids and texts are those of transformers' fast tokenizers on the same files; an argument that is
    not supported is refused. The post-processor in tokenizer.json alone decides which special tokens `encode` adds:
    `add_bos_token` and `add_eos_token` of tokenizer_config.json have no effect beside a tokenizer.json.

    Args:
        backend: The tokenizer. It is shared by all requests and must not be changed afterwards.
        special_tokens: Name -> token, `{"bos_token": "<s>", ...}`. Chat templates see them under these names.
        extra_special_tokens: Special tokens without a name.
        chat_templates: Name -> Jinja source; the template that is used without a name is called "default".
        settings: Of tokenizer_config.json, for calls: `model_max_length`, `padding_side` and `truncation_side`.
    """

    is_fast = True
    model_input_names = ("input_ids", "attention_mask")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        extra_special_tokens: Sequence[str] = (),
        chat_templates: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        settings = settings or {}
        self.model_max_length: int = settings.get("model_max_length") or MOST_TOKENS
        self.padding_side: str = settings.get("padding_side") or "right"
        self.truncation_side: str = settings.get("truncation_side") or "right"
        # A file may have truncation and padding settings from training; a prompt must never be truncated silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.extra_special_tokens = list(extra_special_tokens)
        self.chat_templates = dict(chat_templates or {})
        self.tensor_types: dict[str, Callable[[Any], Any]] = {"np": np.array}
        """What makes the values of ``return_tensors``."""
        self._make_caches()

    def _make_caches(self) -> None:
        self.pieces = TokenPieces(self.backend)
        self._compile = functools.lru_cache(_MAX_COMPILED_TEMPLATES)(_compile_chat_template)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: all but caches, which are made again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("pieces", "_compile")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_caches()

    @classmethod
    def from_path(cls, folder_or_file: str | Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder, or a tokenizer.json with the files beside it.

        Raises:
            FileNotFoundError: There is no tokenizer.json; the message lists what was found and what would work.
            ValueError: A file is invalid.
        """
        return cls(**read_tokenizer_files(Path(folder_or_file)))

    def __getattr__(self, name: str) -> Any:
        """Special tokens by name (`pad_token`, which can be set), their ids (`pad_token_id`), and None without one."""
        token_name, tokens = name.removesuffix("_id"), self.__dict__.get("special_tokens", {})
        if token_name not in (*_NAMED_TOKENS, *tokens):
            raise AttributeError(f"a tokenizer has no attribute {name!r}")
        token = tokens.get(token_name)
        return token if token is None or name == token_name else self.convert_tokens_to_ids(token)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NAMED_TOKENS:
            others = {key: token for key, token in self.special_tokens.items() if key != name}
            name, value = "special_tokens", others if value is None else {**others, name: str(value)}
        elif name == "chat_template":
            name, value = "chat_templates", {**self.chat_templates, "default": value}
        super().__setattr__(name, value)

    vocab_size = property(lambda self: self.backend.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Name -> special token, in transformers' order."""
        tokens = self.special_tokens
        return {name: tokens[name] for name in dict.fromkeys((*_NAMED_TOKENS, *tokens)) if name in tokens}

    vocab = property(get_vocab)
    added_tokens_decoder = property(lambda self: self.backend.get_added_tokens_decoder())

    def get_added_vocab(self) -> dict[str, int]:
        """Added token -> id."""
        return {token.content: token_id for token_id, token in self.added_tokens_decoder.items()}

    chat_template = property(lambda self: self.chat_templates.get("default"))
    all_special_tokens = property(
        lambda self: list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))
    )
    all_special_ids = property(lambda self: self.convert_tokens_to_ids(self.all_special_tokens))

    @functools.cached_property
    def max_token_chars(self) -> int | None:
        """Most characters of a text for each of its tokens; None: there may be no limit."""
        backend = self.backend
        parts = [part.__getstate__().decode() for part in (backend.normalizer, backend.pre_tokenizer) if part]
        steps = "".join(parts).replace(_SPACE_MARK, "")
        kinds = set(re.findall(r'"type":"(\w+)"', steps))
        # a model without a token for each byte can drop or join the characters that it does not have
        every_byte = ByteLevel.alphabet() if "ByteLevel" in kinds else [f"<0x{byte:02X}>" for byte in range(256)]
        has_every_byte = isinstance(backend.model, BPE) and None not in map(backend.token_to_id, every_byte)
        strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        if strips or not has_every_byte or kinds - _KEEPS_LENGTH or '"behavior":"Removed"' in steps:
            return None
        return max(map(len, self.get_vocab())) * (_MOST_COMPOSED if "NFC" in kinds else 1)

    @functools.cached_property
    def _cutter(self) -> TextCutter | None:
        return text_cutter(self.backend)

    def cut(self, text: str, most: int, side: str) -> str:
        """A part of a text with the same ``most`` tokens at its end, if it is truncated on the left ``side``, or at its
        begin; special tokens are not counted. Takes time and memory for so many tokens, not for the text.

        Raises ValueError: the text is long and cannot be cut.
        """
        if len(text) < _LONG:
            return text
        if (cutter := self._cutter) is None:
            check_uncut(text)
            return text
        return cutter.last(text, most) if side == "left" else cutter.first(text, most)

    def check_parts(self, text: str) -> None:
        """Raise ValueError for a text with a part that cannot be cut and keeps the interpreter for long."""
        if len(text) >= _LONG:
            (check_uncut if self._cutter is None else self._cutter.check)(text)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token as it stands in the vocabulary ("Ġhello"), or a list; unknown: UNK's id or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend.token_to_id(tokens)
        return self.backend.token_to_id(self.unk_token) if token_id is None and self.unk_token else token_id

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens as they stand in the vocabulary."""
        return self.backend.decoder.decode(list(tokens)) if self.backend.decoder else " ".join(tokens)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id as it stands in the vocabulary, None for an unknown one; or a list of tokens."""
        ids, skipped = _as_lists(ids), self.all_special_ids if skip_special_tokens else ()
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        return [self.backend.id_to_token(token_id) for token_id in ids if token_id not in skipped]

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text as they stand in the vocabulary."""
        return self._encode(text, pair, add_special_tokens).tokens

    def encode(self, text: Any, text_pair: Any = None, add_special_tokens: bool = True, **options: Any) -> Any:
        """Token ids of a text, or of each of several. Raises TypeError, or ValueError: a text has no UTF-8 form."""
        if isinstance(text, str) and text_pair is None and not options:
            return self._ids(text, add_special_tokens)
        return self(text, text_pair, add_special_tokens=add_special_tokens, **options)["input_ids"]

    def _ids(self, text: str, adds: bool) -> list[int]:
        """Token ids of a text. The library keeps the interpreter while it makes and frees a result, so a long text is
        encoded in parts where it can be cut."""
        ends = self._special_ends if adds else ([], [])
        if len(text) >= _LONG_IN_PARTS and (cutter := self._cutter) is not None and ends is not None:
            ids = list(ends[0])
            with contextlib.suppress(FieldError):  # which names a place in the part
                for part in cutter.parts(text):
                    ids += self._encode(part, None, adds=False, has_offsets=False).ids
                return ids + ends[1]
        return self._encode(text, None, adds, has_offsets=False).ids

    @functools.cached_property
    def _special_ends(self) -> tuple[list[int], list[int]] | None:
        """The tokens that are added before and after a text; None: that is not all that the post-processor does."""
        plain, whole = (self._encode("a", None, adds).ids for adds in (False, True))
        for begin in range(len(whole) - len(plain) + 1):
            if plain and whole[begin : begin + len(plain)] == plain:
                return whole[:begin], whole[begin + len(plain) :]
        return None

    def __call__(
        self,
        text: Any,
        text_pair: Any = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str | None = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        padding_side: str | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
        **options: Any,
    ) -> BatchEncoding:
        """Columns of a text, of a pair, or of each of several, with the arguments of transformers; those that are not
        supported raise TypeError. `add_special_tokens`: whether the post-processor adds its own."""
        names = {"input_ids": True, "attention_mask": options.pop("return_attention_mask", None) is not False}
        for name in ("token_type_ids", "special_tokens_mask", "offsets_mapping", "length"):
            names[name.replace("offsets_", "offset_")] = bool(options.pop(f"return_{name}", None))
        _refuse_unsupported("__call__", options)
        pads = PADDING.get(padding, padding)  # type: ignore[arg-type]
        if truncation is None:
            truncation = max_length is not None and pads == "do_not_pad"
        cuts = TRUNCATION.get(truncation, truncation)
        if pads not in ("longest", "max_length", "do_not_pad") or cuts not in ("longest_first", "do_not_truncate"):
            raise FieldError(f"{padding=}", f"and {truncation=} cannot be used; leave them out, or give True or False")
        most = self.model_max_length if max_length is None else max_length
        is_batch = isinstance(text, list | tuple)
        texts = zip(text, text_pair or [None] * len(text), strict=True) if is_batch else [(text, text_pair)]
        limit = None if cuts == "do_not_truncate" else most
        pairs: list[Any] = [
            one if isinstance(one, list | tuple) and len(one) == 2 else (one, other) for one, other in texts
        ]
        keeps = names["offset_mapping"]
        rows = [self._encode(one, other, add_special_tokens, limit, keeps_offsets=keeps) for one, other in pairs]
        if rows and (pads == "longest" or (pads == "max_length" and most < MOST_TOKENS)):
            length, multiple = most if pads == "max_length" else max(map(len, rows)), pad_to_multiple_of or 1
            side = padding_side or self.padding_side
            pad(rows, -(-length // multiple) * multiple, side, self.pad_token, self.pad_token_id)
        return as_columns(rows, names, return_tensors, self.tensor_types, is_batch=is_batch)

    def _encode(
        self,
        text: Any,
        pair: Any,
        adds: bool,
        most: int | None = None,
        *,
        has_offsets: bool = True,
        keeps_offsets: bool = False,
    ) -> tokenizers.Encoding:
        """``adds``: whether special tokens are added; ``most``: tokens with them, or None for no limit;
        ``keeps_offsets``: whether those of a text that is truncated are read."""
        for one in (text, pair):
            if not isinstance(one, str) and (one is text or one is not None):
                raise FieldTypeError("text", f"must be a str or a list of them, not {type(one).__name__}")
        try:
            if most is not None and pair is None and (self.truncation_side == "right" or not keeps_offsets):
                text = self.cut(text, most, self.truncation_side)
            if len(text) + len(pair or "") < _LONG:
                row = self.backend.encode(text, pair, add_special_tokens=adds)
            else:  # calls for batches leave the interpreter to other threads meanwhile
                encode = self.backend.encode_batch if has_offsets else self.backend.encode_batch_fast
                (row,) = encode([text if pair is None else (text, pair)], add_special_tokens=adds)
            if most is None or len(row) <= most:
                return row
            if pair is not None:
                raise ValueError("a pair of texts cannot be truncated; truncate each of them")
            row = self.backend.encode(text, add_special_tokens=False)
            num_added = self.backend.num_special_tokens_to_add(is_pair=False) if adds else 0
            row.truncate(max(0, most - num_added), direction=self.truncation_side)
            return self.backend.post_process(row, add_special_tokens=adds)
        except TypeError:  # the library's error for a str that is not valid Unicode
            try:
                (text + (pair or "")).encode()
            except UnicodeEncodeError as error:
                raise FieldError(
                    "text",
                    f"has a lone surrogate {error.object[error.start]!a} at position {error.start} and so no UTF-8 "
                    "form; remove it, or decode the text's source with errors='replace'",
                ) from None
            raise

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of token ids (a number, a list, an array), or of each of several lists. Unknown ids have no text."""
        _refuse_unsupported("decode", options)
        token_ids = _as_lists(token_ids["input_ids"] if isinstance(token_ids, Mapping) else token_ids)
        if isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list):
            return [self.decode(row, skip_special_tokens) for row in token_ids]
        token_ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if isinstance(token_ids, list) and len(token_ids) >= _MANY:
            text = self.pieces.decode(token_ids, skips_special=skip_special_tokens)
            if text is not None:
                return text
        if isinstance(token_ids, list) and len(token_ids) >= _LONG:  # as of `_encode`
            (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
            return text
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        """The text of each of several lists of token ids."""
        texts = self.decode(sequences, skip_special_tokens, **options)
        return [texts] if isinstance(texts, str) else texts

    def decode_token(self, token_id: int) -> str:
        """The text of one token by itself: its name if it is special, "" for an unknown id, U+FFFD for invalid UTF-8. A
        leading space is kept, except by decoders that do not work token by token (see `detokenizer.py`)."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; b"" for an unknown id."""
        pieces = self.pieces
        piece = pieces.decode_window([token_id]) if pieces.decoder is None else pieces.tables[False][token_id]
        return piece if isinstance(piece, bytes) else piece.encode()

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        *,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation, or each of several, as a prompt in the format of the model's training.

        Contents are strings or lists of `{"type": "text", "text": ...}` parts. `chat_template` is a Jinja template, or
        the name of one of the tokenizer's: by default "tool_use" if there are tools and one has this name, else
        "default". Other keywords are variables of the template. Raises ValueError: there is no template, or it or the
        messages are invalid; the error names the place.
        """
        _refuse_unsupported("apply_chat_template", {name: kwargs.pop(name) for name in _UNSUPPORTED if name in kwargs})
        template = self._compile(self.get_chat_template(chat_template, tools))
        is_batch = isinstance(conversation, list | tuple) and isinstance((*conversation, 0)[0], list | tuple)
        given: dict[str, Any] = {"tools": tools, "documents": documents, "variables": {**self.special_tokens, **kwargs}}
        given |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        texts = [template.render(one, **given) for one in (conversation if is_batch else [conversation])]
        text = texts if is_batch else texts[0]
        if not tokenize:
            return text
        options: dict[str, Any] = {"padding": padding, "truncation": truncation, "max_length": max_length}
        options |= {"return_tensors": return_tensors, "add_special_tokens": False, **(tokenizer_kwargs or {})}
        return self(text, **options) if return_dict else self.encode(text, **options)

    def apply_chat_template_ids(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation that the model answers."""
        return self.apply_chat_template(messages, **{"add_generation_prompt": True, **kwargs}, return_dict=False)

    def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str:
        """The Jinja source that `apply_chat_template` uses."""
        templates = self.chat_templates
        names = f"the tokenizer has {sorted(templates) if templates else 'none'}"
        default = "tool_use" if tools is not None and "tool_use" in templates else "default"
        name = default if chat_template is None else chat_template
        if not isinstance(name, str):
            raise FieldTypeError(
                "chat_template", f"is {name!r}; it must be the text of a Jinja template, or a name ({names})", name
            )
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


def _refuse_unsupported(call: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        is_neutral = value is None or value is False or (isinstance(value, int) and value == _UNSUPPORTED.get(name))
        if name not in _UNSUPPORTED or not is_neutral:
            raise TypeError(f"Tokenizer.{call} does not support {name}={value!r}; leave it out")


def _as_lists(value: Any) -> Any:
    """Arrays, tensors and their scalars as lists and ints."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def _compile_chat_template(source: str) -> ChatTemplate:
    from fleetfoot.tokenizer.chat_template import ChatTemplate  # imports jinja2

    return ChatTemplate(source)

"""`SamplingParams`: the parameters of a request, validated when they are created."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from fleetfoot.compat.names import SAMPLING_KEYWORDS
from fleetfoot.records.structured_outputs import StructuredOutputsParams, as_structured_outputs
from fleetfoot.utils.validation import FieldError, checked_keywords

EXTRA_ARGS = ("kv_transfer_params",)
_TOKEN_IDS = "token ids (integers of at least 0; True and False are none)"


class RequestOutputKind(enum.Enum):
    """Content of streamed outputs."""

    CUMULATIVE = 0
    """All tokens so far."""
    DELTA = 1
    """Tokens since the previous output."""
    FINAL_ONLY = 2
    """One output when the request has finished."""


@checked_keywords
@dataclass(slots=True)
class SamplingParams:
    """Sampling, stopping and output of one request.

    Names, order, defaults and meanings are vLLM's. Creating an object, or cloning one after fields were assigned,
    validates every field and raises a `ValueError` that names the field, the value and what is allowed; an unknown
    keyword raises a `TypeError`. `validate_for_model` checks what depends on the model.

    A ``stop`` string becomes a list of one; lists are copied, and ``None`` becomes an empty list for ``stop``,
    ``stop_token_ids`` and ``bad_words``. No other value is changed.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, str]]] = SAMPLING_KEYWORDS
    renamed: ClassVar[Mapping[str, str]] = {"guided_decoding": "structured_outputs"}

    n: int = 1
    """Number of outputs, each with a seed of its own. Must be 1 with greedy sampling, where all would be equal."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token in the output so far. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each occurrence in the output so far. In [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the prompt or the output so far; above 1
    discourages repetition. Source: Keskar et al., "CTRL", 2019."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy: the most probable token, the lowest id among ties."""
    top_p: float = 1.0
    """Sample from the smallest set of most probable tokens with probabilities that add up to this. In (0, 1]; 1 is off.
    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020."""
    top_k: int = 0
    """Sample from this many most probable tokens, and those that tie with the last; 0 or -1 is off."""
    min_p: float = 0.0
    """Sample from tokens at least this probable relative to the most probable one. In [0, 1]; 0 is off."""
    seed: int | None = None
    """64 bits that make the request's samples reproducible. ``None`` (or -1) derives a seed from the engine's."""
    stop: str | list[str] | None = None
    """Strings that end the output when they appear in its text. They are not part of the output."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output when they are sampled, in addition to the model's end tokens."""
    ignore_eos: bool = False
    """Continue after the model's end tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; ``None``: limited by the model's length only."""
    min_tokens: int = 0
    """End tokens and ``stop_token_ids`` cannot be generated before there are this many."""
    logprobs: int | None = None
    """Return the log-probability of each generated token and of this many most probable ones; -1: of all.
    Computed from the logits of the model, before sampling parameters apply."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    detokenize: bool = True
    """Return text. ``stop`` needs it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens that are kept in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of streamed outputs."""
    logit_bias: dict[int, float] | None = None
    """Token id (an int, or a string of one) to a number added to its logit. In [-1e9, 1e9]."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens can be generated."""
    bad_words: list[str] | None = None
    """Words that cannot be generated: the token that would complete one is excluded."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens from the end of the prompt; -1: as many as the model's length allows."""
    extra_args: dict[str, Any] | None = None
    """Other parameters: ``kv_transfer_params``, a dict for the KV connector, and those of the engine's own logits
    processors."""
    logits_processors: list[Callable[..., Any]] | None = None
    """Functions of the output's token ids and the logits ``[vocab_size]``, or of the prompt's, the output's and the
    logits, that return the logits. They need Model Runner V1."""
    structured_outputs: StructuredOutputsParams | None = None
    """A JSON schema, grammar, regular expression or choice that the output fits; a dict is converted."""

    def __post_init__(self) -> None:
        for name, kind, low, high, allowed, *others in _BOUNDS:
            value = getattr(self, name)
            if type(value) is not kind or not low <= value <= high:  # fast path: most values are valid as they are
                setattr(self, name, _checked(name, value, kind, low, high, allowed, *others))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise FieldError(name, f"must be True or False, got {getattr(self, name)!r}", getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            allowed = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise FieldError("output_kind", f"must be one of {allowed}, got {self.output_kind!r}", self.output_kind)
        self.stop = _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self.bad_words = _strings("bad_words", self.bad_words)
        stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = list(dict.fromkeys(_token_ids("stop_token_ids", stop_token_ids)))
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise FieldError(
                    "allowed_token_ids", "must hold at least one token id, or not be set (all tokens), got []", []
                )
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        if self.extra_args is not None:
            if not isinstance(self.extra_args, dict):
                raise FieldError("extra_args", f"must be a dict, or not set, got {self.extra_args!r}", self.extra_args)
            self.extra_args = copy.deepcopy(self.extra_args)
        if self.logits_processors is not None:
            given = self.logits_processors
            if not isinstance(given, list | tuple) or not all(callable(function) for function in given):
                raise FieldError("logits_processors", f"must be a list of functions, or not set, got {given!r}", given)
            self.logits_processors = list(given)
        if self.structured_outputs is not None:
            self.structured_outputs = as_structured_outputs(self.structured_outputs)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.seed == -1:  # as in vLLM: no seed
            self.seed = None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                "min_tokens", f"must be at most max_tokens={self.max_tokens}, got {self.min_tokens}", self.min_tokens
            )
        if self.stop and not self.detokenize:
            problem = f"is {self.stop!r} and needs detokenize: stop strings are found in the text"
            raise FieldError("stop", problem, self.stop)
        if self.temperature == 0 and self.n > 1:
            raise FieldError(
                "n", f"must be 1 with greedy sampling (temperature=0), got {self.n}: all copies would be equal", self.n
            )

    def clone(self) -> SamplingParams:
        """A validated copy without shared mutable values.

        A subclass is copied as `SamplingParams`: a worker process could not import a class of the user's program.
        """
        copied = object.__new__(SamplingParams)
        for name in _FIELD_NAMES:
            setattr(copied, name, getattr(self, name))
        copied.__post_init__()
        return copied

    def validate_for_model(self, *, vocab_size: int, max_logprobs: int = 20, has_tokenizer: bool = True) -> None:
        """Check what depends on the model. Raises `ValueError`.

        Args:
            vocab_size: of the logits; every token id must be below it.
            max_logprobs: most logprobs of one position; -1: the whole vocabulary.
            has_tokenizer: whether the engine has a tokenizer (``skip_tokenizer_init`` is off).
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            outside = [token_id for token_id in ids or () if token_id >= vocab_size]
            if outside:
                raise FieldError(
                    name,
                    f"names tokens {outside!s:.100} outside the model's vocabulary [0, {vocab_size - 1}]",
                    outside,
                )
        most = vocab_size if max_logprobs == -1 else max_logprobs
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            num_logprobs = vocab_size if count == -1 else count
            if num_logprobs is not None and num_logprobs > most:
                shown = f"-1 (all {vocab_size} tokens)" if count == -1 else count
                raise FieldError(
                    name,
                    f"must be at most {most}, got {shown}; "
                    f"start the engine with max_logprobs={-1 if count == -1 else count} to allow it",
                    count,
                )
        for name in ("stop", "bad_words"):
            if getattr(self, name) and not has_tokenizer:
                raise FieldError(
                    name,
                    f"is {getattr(self, name)!r} and needs a tokenizer, and the engine has none (skip_tokenizer_init); "
                    "use stop_token_ids or logit_bias",
                    getattr(self, name),
                )


@checked_keywords
@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of `fleetfoot.LLM.beam_search`."""

    beam_width: int
    """Sequences to keep, and to return."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Above 0, a sampled token is a candidate beside the ``2 * beam_width`` most probable ones."""
    length_penalty: float = 1.0
    """Sequences are ranked by their logprob, divided by their length, prompt included, to this power."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            setattr(self, name, _checked(name, getattr(self, name), int, 1, _INF, "an integer of at least 1"))
        self.temperature = SamplingParams(temperature=self.temperature).temperature
        words = "a number in [-40, 40]"  # lengths to this power are floats
        self.length_penalty = _checked("length_penalty", self.length_penalty, float, -40, 40, words)


_FIELD_NAMES = tuple(item.name for item in dataclasses.fields(SamplingParams))
_FLAGS = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.type == "bool")


def is_integer(value: object) -> bool:
    """Whether ``value`` is one integer, of Python or of an array library; a boolean may pass for one."""
    return isinstance(value, int) or (getattr(value, "ndim", 1) == 0 and "int" in str(getattr(value, "dtype", "")))


def is_boolean(value: object) -> bool:
    """Whether ``value`` is a bool of Python, or of an array library; some of those convert to int silently."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _checked(name: str, value: Any, kind: type, low: float, high: float, allowed: str, *others: float | None) -> Any:
    """``value`` as a finite number of the kind (bools are none), if it is in [low, high] or one of ``others``."""
    if value is None and None in others:
        return None
    number: float | None = None
    try:
        if kind is int:
            number = None if is_boolean(value) else operator.index(value)
        elif isinstance(value, Real) and not isinstance(value, bool):
            number = float(value)
    except (TypeError, OverflowError):  # not an integer; an int beyond any float
        pass
    if number is None or not (low <= number <= high or number in others):
        raise FieldError(name, f"must be {allowed}, got {value!r}", value)
    return number


_INF = math.inf
_NUM_LOGPROBS = "-1 (the whole vocabulary), an integer of at least 0, or not set"
_BOUNDS: tuple[tuple[Any, ...], ...] = (
    ("n", int, 1, 16384, "an integer in [1, 16384]"),
    ("presence_penalty", float, -2, 2, "a number in [-2, 2]"),
    ("frequency_penalty", float, -2, 2, "a number in [-2, 2]"),
    # This and the temperatures are normal float32 numbers far from overflow: the device divides by exactly the value.
    ("repetition_penalty", float, 1e-6, 1e6, "a number in [1e-06, 1e+06]"),
    ("temperature", float, 1e-30, 1e30, "0 (greedy) or a number in [1e-30, 1e+30]", 0),
    ("top_p", float, math.ulp(0), 1, "a number in (0, 1]"),
    ("min_p", float, 0, 1, "a number in [0, 1]"),
    ("top_k", int, -1, _INF, "an integer of at least 1, or 0 or -1 (off)"),
    ("seed", int, -(2**63), 2**64 - 1, "an integer in [-2**63, 2**64 - 1], or not set", None),
    ("max_tokens", int, 1, _INF, "an integer of at least 1, or not set", None),
    ("min_tokens", int, 0, _INF, "an integer of at least 0"),
    ("logprobs", int, -1, _INF, _NUM_LOGPROBS, None),
    ("prompt_logprobs", int, -1, _INF, _NUM_LOGPROBS, None),
    ("truncate_prompt_tokens", int, 1, _INF, "-1 (the model's length), an integer of at least 1, or not set", None, -1),
)
"""Arguments of `_checked`: field, kind, lowest, highest, what is allowed, and other values."""


def bad_words_token_ids(
    bad_words: Iterable[str], encode: Callable[[str], list[int]], vocab_size: int | None = None
) -> list[list[int]]:
    """Token sequences of the words, which the sampler keeps from being completed.

    Most tokenizers encode a word differently at the beginning of a text and after a space, so each word can have two
    sequences.

    Args:
        encode: must not add special tokens.
        vocab_size: of the model; sequences with tokens outside of it cannot be generated, and are left out.

    Raises:
        ValueError: a word has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}  # ordered, without duplicates
    for word in bad_words:
        bare = word.lstrip()
        # white space has one spelling only
        spellings = (bare, " " + bare) if bare else (word,)
        encoded = [tuple(encode(spelling)) for spelling in spellings]
        if not encoded[0]:
            raise FieldError(
                "bad_words", f"has {word!r}, which has no tokens in this model's vocabulary; leave it out", word
            )
        sequences.update(dict.fromkeys(sequence for sequence in encoded if sequence))
    return [list(sequence) for sequence in sequences if vocab_size is None or max(sequence) < vocab_size]


def _strings(name: str, values: Any) -> list[str]:
    if values is None:
        return []
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise FieldError(name, f"must be a list of strings, got {values!r}", values)
    for value in values:
        if not isinstance(value, str) or not value or any("\ud800" <= character <= "\udfff" for character in value):
            raise FieldError(
                name, f"must hold strings that are not empty, without lone surrogates, got {value!r}", value
            )
    return list(values)


def _token_ids(name: str, values: Any) -> list[int]:
    num_dims = getattr(values, "ndim", 1)  # of an array
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or num_dims != 1:
        raise FieldError(name, f"must be a list of token ids, got {values!r}", values)
    return [_checked(name, value, int, 0, _INF, f"a list of {_TOKEN_IDS}") for value in values]


def _logit_bias(values: Any) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise FieldError("logit_bias", f"must be a dict of token id to bias, got {values!r}", values)
    biases: dict[int, float] = {}
    for key, bias in values.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        token_id = _checked("logit_bias", token_id, int, 0, _INF, f"keyed by {_TOKEN_IDS}")
        if token_id in biases:
            raise FieldError(
                "logit_bias", f"must name each token once, as an int or as a string, got {values!r}", values
            )
        biases[token_id] = _checked(f"logit_bias[{token_id}]", bias, float, -1e9, 1e9, "a number in [-1e+09, 1e+09]")
    return biases

"""Input processing: validates and tokenizes a prompt and its parameters before anything is queued."""

from __future__ import annotations

import pickle
import time
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fleetfoot.config.pooling import Pooling, check_dimensions
from fleetfoot.engine.pooling_texts import PoolingTexts
from fleetfoot.inputs import PromptType
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.sampling_params import (
    EXTRA_ARGS,
    RequestOutputKind,
    SamplingParams,
    bad_words_token_ids,
    is_boolean,
    is_integer,
)
from fleetfoot.records.structured_outputs import as_structured_outputs
from fleetfoot.sampling.custom_processors import describe
from fleetfoot.sampling.request_params import request_seed
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.structured.masks import GrammarState
from fleetfoot.utils.validation import FieldError, FieldTypeError

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

    TokenIds = array[int]
else:
    TokenIds = array  # Python 3.11 has no generic one

COPY_MARK = "\x1f"
"""Separates request id and index in the ids of sequences if ``n`` is above 1. Not allowed in users' ids."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

Limit = tuple[str, int | None]
"""The field in which a client asks for a number of tokens, and the number; None: it is not given."""
TOO_LONG = "context_length_exceeded"
"""The code of the errors of prompts with more tokens than the model's length allows."""
LONG_TEXT = 4096
"""Characters from which on an event loop tokenizes a prompt in a thread: it takes about a millisecond."""

_ENTRY_CHARS = 8
_MAX_CACHED_BAD_WORDS = 128
_LARGE = 1 << 62
"""Above any number of tokens, and fits in messages between processes."""


class EngineRequest(msgspec.Struct, array_like=True, tag=True):
    """A validated and tokenized request: the one record of it from here to the scheduler, between processes too."""

    request_id: str
    prompt: str | None
    """Text, if known. It does not travel between processes."""
    prompt_token_ids: TokenIds
    """int32."""
    params: SamplingParams
    """Validated; not shared with the caller, but possibly with other requests."""
    bad_words_token_ids: list[list[int]]
    kv_transfer_params: dict[str, Any] | None
    """Parameters for the KV connector."""
    max_tokens: int
    """Most output tokens, limited by the model's length."""
    priority: int
    cache_salt: str | None
    arrival_time: float
    """Wall clock, seconds since the epoch."""
    pooling_params: PoolingParams | None = None
    resumed: list[list[int] | None] | None = None
    """Tokens that each of the ``n`` sequences has from another engine, and continues; None: that one has ended."""
    seed_number: int | None = None
    """What default seeds depend on besides the engine's seed. None: the number of earlier requests, set by
    `InputProcessor.make_requests`; given for a request that another engine has begun."""
    flow: str = ""
    """See `Request.flow`, as of the next two."""
    session: str = ""
    rank: int = -1
    number: int = 0
    """The number of its first sequence, which its client assigns. Its ``n`` sequences have consecutive ones."""
    client: bytes = b""
    """The address of its client, which the engine's process sets."""


_SHARED_FIELDS = ({each.name for each in fields(Request)} & {*EngineRequest.__struct_fields__}) - {"request_id"}
"""What a sequence has of its request, under the same names."""


class InputProcessor:
    """Validates and tokenizes requests.

    Args:
        vocab_size: of the model; token ids must be below it.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: the model's end tokens.
        tokenizer: None if the engine runs on token ids only.
        max_logprobs: most logprobs of one position; -1: the whole vocabulary.
        seed: of the engine; the default for sequences without a seed.
        sampling_defaults: of the model; used for requests without parameters.
        pooling: what the engine computes of prompts; None: it generates text.
        grammars: compiles structured outputs; None: there is no tokenizer.
        check_further: raises ValueError for parameters that the engine's runner or logits processors refuse.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        max_logprobs: int,
        seed: int,
        sampling_defaults: Mapping[str, Any] | None = None,
        pooling: Pooling | None = None,
        grammars: GrammarCompiler | None = None,
        check_further: Callable[[SamplingParams], None] = lambda _: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # a checkpoint may list end tokens outside its own vocabulary, which are never sampled
        self.eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self.tokenizer = tokenizer
        self.max_logprobs = max_logprobs
        self.sampling_defaults = dict(sampling_defaults or {})
        self._seed = seed
        self.check_further = check_further
        self.grammars = grammars or GrammarCompiler(None, vocab_size, ())
        self.pooling = pooling
        self.pooling_texts: PoolingTexts | None = None
        if pooling is not None and tokenizer is not None:
            self.pooling_texts = PoolingTexts(pooling, tokenizer, max_model_len)
        self._wall_clock = wall_clock
        self._num_requests = 0
        self._bad_words = lru_cache(_MAX_CACHED_BAD_WORDS)(self._tokenize_bad_words)

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        params_checked: bool = False,
    ) -> EngineRequest:
        """Validate and tokenize a request. Changes no state, so it may run in any thread.

        Args:
            priority: lower runs sooner.
            params_checked: ``params`` is a result of `check_params`.

        Raises:
            ValueError, TypeError: the message names the field, its value and what would work.
        """
        arrival_time = self._wall_clock()
        params = params if params_checked else self.check_params(params)
        if is_boolean(priority) or not is_integer(priority):
            raise FieldTypeError("priority", f"is {priority!r}; it must be an int, lower is sooner", priority)
        if abs(int(priority)) > _LARGE:
            raise FieldError("priority", f"is {priority!r}; it must be in [-2**62, 2**62]", priority)
        text, ids, cache_salt = self._read_prompt(prompt, params)
        keep = params.truncate_prompt_tokens
        pooling_params = None
        if isinstance(params, PoolingParams):
            pooling_params = params
            if params.prompt_name is not None and text is None:
                raise FieldError(
                    "prompt_name",
                    f"is {params.prompt_name!r}, and the prompt has no text; leave one out",
                    params.prompt_name,
                )
            ids = ids[: self._longest_prompt if keep == -1 else keep]
            params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        elif keep is not None:
            most = self.max_model_len - (params.max_tokens or 1)  # so that the output has room, if it can
            ids = ids[-((most if most > 0 else self._longest_prompt) if keep == -1 else keep) :]
        self._check_tokens(ids)
        room = self._longest_prompt + 1 - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise FieldError(
                "min_tokens",
                f"is {params.min_tokens}, but a prompt of {len(ids)} tokens leaves room for "
                f"{max_tokens} (max_model_len {self.max_model_len}, max_tokens {params.max_tokens})",
                params.min_tokens,
            )
        return EngineRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=array("i", ids.astype(np.int32).tobytes()),
            params=params,
            bad_words_token_ids=self._bad_words(tuple(params.bad_words)) if params.bad_words else [],
            kv_transfer_params=_kv_transfer_params(params),
            max_tokens=max_tokens,
            priority=int(priority),
            cache_salt=cache_salt,
            arrival_time=arrival_time,
            pooling_params=pooling_params,
        )

    @property
    def _longest_prompt(self) -> int:
        """In tokens: without pooling, there is room for one more."""
        return self.max_model_len - (self.pooling is None)

    @property
    def _limit(self) -> str:
        """Words of errors, before a number. Clients look for those of OpenAI's API, to shorten a conversation."""
        most = f"this model's maximum context length is {self.max_model_len} tokens (max_model_len)"
        return f"{most}, so it can have at most"

    def check_params(self, params: SamplingParams | PoolingParams) -> Any:
        """A validated copy of parameters, which several requests can share.

        Raises:
            ValueError, TypeError: the message names the field, its value and what would work.
        """
        if self.pooling is not None:
            return _checked_pooling_params(params, self.pooling, self.max_model_len)
        if isinstance(params, PoolingParams):
            raise FieldTypeError(
                "pooling_params",
                "were given, and this engine generates text; start it with runner='pooling', or give SamplingParams",
            )
        if not isinstance(params, SamplingParams):
            raise FieldTypeError("sampling_params", f"is {params!r}; it must be a SamplingParams", params)
        params = params.clone()  # validates again, because fields may have been assigned
        params.validate_for_model(
            vocab_size=self.vocab_size, max_logprobs=self.max_logprobs, has_tokenizer=self.tokenizer is not None
        )
        params.top_k = min(params.top_k, self.vocab_size)  # equivalent, and fits in an int32
        for name in ("max_tokens", "truncate_prompt_tokens"):
            if (value := getattr(params, name)) is not None:
                setattr(params, name, min(value, _LARGE))  # equivalent, too
        if params.bad_words:
            self._bad_words(tuple(params.bad_words))
        if params.min_tokens and params.allowed_token_ids:
            ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}
            if ends.issuperset(params.allowed_token_ids):
                raise FieldError(
                    "allowed_token_ids",
                    f"is {params.allowed_token_ids!r}, end tokens and stop_token_ids alone, which "
                    f"min_tokens={params.min_tokens} bans at first; allow another token, or set min_tokens=0",
                    params.allowed_token_ids,
                )
        _kv_transfer_params(params)
        self.check_further(params)
        if params.structured_outputs is not None:
            self._check_structured(params)
        return params

    def _check_structured(self, params: SamplingParams) -> None:
        assert params.structured_outputs is not None
        ends = self.grammars.eos_token_ids
        if params.allowed_token_ids is not None and ends and not set(ends) & set(params.allowed_token_ids):
            raise FieldError(
                "allowed_token_ids",
                f"is {params.allowed_token_ids!r:.200} and has none of the end tokens {list(ends)}, which end an "
                "output under structured_outputs; add one",
                params.allowed_token_ids,
            )
        self.grammars.compile(params.structured_outputs)

    def compile_grammar(self, params: Any) -> Any:
        """Compile the structured outputs of parameters, so that `process` does not wait for it. Takes up to seconds.
        Returns what `grammars` returns.

        Raises:
            ValueError: they cannot be compiled.
        """
        structured = as_structured_outputs(params.structured_outputs)
        return None if structured is None else self.grammars.compile(structured)

    def make_requests(self, request: EngineRequest) -> list[Request]:
        """One `Request` for each of the ``n`` sequences. Default seeds depend on the number of earlier requests."""
        params = request.params
        seed = None if params.seed == -1 else params.seed
        number = self._num_requests if request.seed_number is None else request.seed_number
        request.seed_number, self._num_requests = number, max(self._num_requests, number + 1)
        shared = {name: getattr(request, name) for name in _SHARED_FIELDS}
        sequences = [
            Request(
                request.request_id if params.n == 1 else f"{request.request_id}{COPY_MARK}{index}",
                **shared,
                seed=request_seed(seed, index, self._seed, number),
                eos_token_ids=self.eos_token_ids,
                reads_whole_prompt=_reads_whole_prompt(request.pooling_params, self.pooling),
                grammar=self._start_grammar(params),
            )
            for index in range(params.n)
        ]
        if request.resumed is None:
            return sequences
        kept = []
        for sequence, token_ids in zip(sequences, request.resumed, strict=True):
            if token_ids is not None:
                sequence.output_token_ids = token_ids
                sequence.status = RequestStatus.PREEMPTED if token_ids else RequestStatus.WAITING
                kept.append(sequence)
        return kept

    def _start_grammar(self, params: SamplingParams) -> GrammarState | None:
        structured = params.structured_outputs
        if structured is None:
            return None
        return self.grammars.start(structured, min_tokens=params.min_tokens, ignore_eos=params.ignore_eos)

    def _read_prompt(
        self, prompt: PromptType, params: SamplingParams | PoolingParams
    ) -> tuple[str | None, np.ndarray, str | None]:
        """Text (if known), token ids (``[num_tokens]`` int64) and cache salt of any form of prompt."""
        if isinstance(prompt, str):
            return prompt, self._tokenize_for(prompt, params), None
        if not isinstance(prompt, dict):
            return None, _as_token_ids(prompt, "prompt", "a string, a dictionary or a list of token ids"), None
        for key in prompt:
            if key not in PROMPT_KEYS and prompt[key] is not None:  # type: ignore[literal-required]
                raise FieldError("prompt", f"has a field {key!r}; it can have {', '.join(PROMPT_KEYS)}", key)
        text, token_ids, salt = map(prompt.get, PROMPT_KEYS)
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise FieldError("cache_salt", f"is {salt!r}; it must be a string that is not empty", salt)
        if text is not None and not isinstance(text, str):
            raise FieldTypeError("prompt", f"is {text!r}; it must be a string", text)
        if token_ids is not None:
            return text, _as_token_ids(token_ids), salt
        if text is None:
            raise FieldError(
                "prompt", "is a dictionary without 'prompt' (text) and 'prompt_token_ids' (a list of ints)"
            )
        return text, self._tokenize_for(text, params), salt

    def _tokenize_for(self, text: str, params: SamplingParams | PoolingParams) -> np.ndarray:
        keep = params.truncate_prompt_tokens
        if self.pooling_texts is None or isinstance(params, SamplingParams):
            return self.tokenize(text if keep is None else self.cut(text, keep), is_cut=keep is not None)
        if keep is None:
            self._check_length("prompt", text)
        return np.frombuffer(array("q", self.pooling_texts.tokenize(text, params)), np.int64)

    def cut(self, text: str, keep: int) -> str:
        """An end of a text with the last ``keep`` tokens; -1: as many as a prompt has.

        Raises ValueError: the text cannot be cut, or would keep more tokens than a prompt can have.
        """
        if self.tokenizer is None:
            return text
        longest = self._longest_prompt
        kept = self.tokenizer.cut(text, longest + 1 if keep == -1 else min(keep, longest + 1), "left")
        if keep > longest and len(kept) < len(text):
            raise FieldError(
                "prompt",
                f"has more than {longest} tokens, and truncate_prompt_tokens is {keep}; {self._limit} {longest}",
                code=TOO_LONG,
            )
        return kept

    def tokenize(self, text: str, *, is_cut: bool = False, **options: Any) -> np.ndarray:
        """Token ids of a prompt, ``[num_tokens]`` int64; it may be too long if it ``is_cut`` afterwards."""
        if self.tokenizer is None:
            raise FieldError(
                "prompt",
                "is a text, and this engine has no tokenizer (skip_tokenizer_init=True); give {'prompt_token_ids': "
                "[...]}",
                text,
            )
        if not is_cut:
            self._check_length("prompt", text)
        ids = self.tokenizer.encode(text, **options)
        if not (text or ids):
            raise FieldError("prompt", "is an empty string, to which the tokenizer adds no token; give some text")
        return np.frombuffer(array("q", ids), np.int64)

    def _check_length(self, field: str, text: str) -> None:
        """Raise ValueError for a text that its length or its beginning shows to have too many tokens."""
        longest = self._longest_prompt
        if self.tokenizer is None or len(text) <= 4 * longest:  # no need to find the longest token
            return
        num_chars = self.tokenizer.max_token_chars
        if num_chars is None:
            return
        if len(text) > longest * num_chars:
            raise FieldError(
                field,
                f"has {len(text)} characters; {self._limit} {longest * num_chars}: {longest} tokens of at "
                f"most {num_chars} characters",
                text,
                TOO_LONG,
            )
        begin = text[: 8 * longest]  # a token that is cut off may become as many as it has characters
        if len(text) > 2 * len(begin) and (count := len(self.tokenizer.encode(begin))) > 1.5 * longest + num_chars:
            raise FieldError(
                field,
                f"has {len(text)} characters, the first {len(begin)} of them {count} tokens; {self._limit} {longest}",
                text,
                TOO_LONG,
            )

    def _check_tokens(self, ids: np.ndarray) -> None:
        if not len(ids):
            raise FieldError("prompt", "has no tokens; it must have at least one")
        if ids.view(np.uint64).max() >= self.vocab_size:  # as unsigned numbers, negative ids are the largest
            position = int(ids.argmin() if ids.min() < 0 else ids.argmax())
            raise FieldError(
                f"prompt_token_ids[{position}]",
                f"is {ids[position]}; the model's vocabulary has {self.vocab_size} tokens, 0 to {self.vocab_size - 1}",
                int(ids[position]),
            )
        if len(ids) > self._longest_prompt:
            room = ", so that there is room for one more" if self.pooling is None else ""
            raise FieldError(
                "prompt",
                f"has {len(ids)} tokens; {self._limit} {self._longest_prompt}{room}",
                len(ids),
                TOO_LONG,
            )

    def _tokenize_bad_words(self, bad_words: tuple[str, ...]) -> list[list[int]]:
        assert self.tokenizer is not None  # validate_for_model refuses bad words without one
        tokenizer = self.tokenizer
        for word in bad_words:
            self._check_length("bad_words", word)
        return bad_words_token_ids(
            bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False), self.vocab_size
        )


def check_room(limit: Limit | None, request: EngineRequest) -> None:
    """Raise ValueError for a prompt that leaves room for fewer tokens than were asked for."""
    if limit is not None and limit[1] is not None and limit[1] > request.max_tokens:
        name, asked = limit
        num_tokens = len(request.prompt_token_ids)
        raise FieldError(
            name,
            f"is {asked}, and a prompt of {num_tokens} tokens leaves room for {request.max_tokens}: this model's "
            f"maximum context length is {num_tokens + request.max_tokens} tokens (max_model_len); ask for less",
            asked,
            TOO_LONG,
        )


def is_of_prompt(error: FieldError) -> bool:
    """Whether an error is about a prompt, which a caller may know by another name."""
    return error.field.partition("[")[0] in ("prompt", "prompt_token_ids")


def needs_grammar(params: object) -> bool:
    """Whether parameters have structured outputs, which take time to compile."""
    return getattr(params, "structured_outputs", None) is not None


def is_long_text(prompt: object) -> bool:
    """Whether a prompt is a long text without token ids."""
    if isinstance(prompt, dict):
        prompt = None if prompt.get("prompt_token_ids") is not None else prompt.get("prompt")
    return isinstance(prompt, str) and len(prompt) >= LONG_TEXT


def input_size(prompt: object, params: object) -> int:
    """About how many characters take as long to tokenize as a prompt and its parameters take to validate."""
    if isinstance(prompt, dict):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    size = len(prompt) if hasattr(prompt, "__len__") else 0
    sizes = [len(getattr(params, name, None) or ()) for name in ("logit_bias", "allowed_token_ids", "bad_words")]
    return (size if isinstance(prompt, str) else size // 4) + _ENTRY_CHARS * sum(sizes)


def _checked_pooling_params(params: Any, pooling: Pooling, max_model_len: int) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise FieldTypeError(
            type(params).__name__,
            "was given, and this engine pools (runner is 'pooling') and generates no text; "
            "give PoolingParams (to LLM.embed or score, for instance), or start it with runner='generate'",
        )
    params = params.clone(task=params.task or pooling.tasks[0])
    if params.task not in pooling.tasks:
        raise FieldError(
            "task", f"is {params.task!r}; with this model it can be {', '.join(pooling.tasks)}", params.task
        )
    if params.dimensions is not None:
        check_dimensions(params.dimensions, pooling)
    if (params.truncate_prompt_tokens or 0) > max_model_len:
        raise FieldError(
            "truncate_prompt_tokens",
            f"is {params.truncate_prompt_tokens}; with max_model_len={max_model_len} it can be "
            f"at most {max_model_len}, or -1",
            params.truncate_prompt_tokens,
        )
    if params.step_tag_id is not None and params.task not in ("token_classify", "token_embed"):
        raise FieldError(
            "step_tag_id",
            f"is {params.step_tag_id}, and task {params.task!r} is not of tokens; leave it out",
            params.step_tag_id,
        )
    return params


def _reads_whole_prompt(params: PoolingParams | None, pooling: Pooling | None) -> bool:
    if params is None or pooling is None:
        return False
    return pooling.needs_whole_prompt or str(params.task).startswith("token_")


_PART = 1 << 16
_NO_TOKENS = str, bytes, bytearray, memoryview, Mapping, Set


def _array_of(entries: Any) -> array[int]:
    """The entries as int64: a part at a time, because a call keeps the interpreter."""
    if len(entries) <= _PART:
        return array("q", entries)
    whole = array("q")
    for begin in range(0, len(entries), _PART):
        whole.extend(array("q", entries[begin : begin + _PART]))
    return whole


def _as_token_ids(token_ids: object, name: str = "prompt_token_ids", allowed: str = "a list of ints") -> np.ndarray:
    num_dims = getattr(token_ids, "ndim", 1)  # of an array
    if isinstance(token_ids, _NO_TOKENS) or not hasattr(token_ids, "__iter__") or num_dims != 1:
        raise FieldTypeError(name, f"is {token_ids!r:.200}; it must be {allowed}", token_ids)
    entries: Any = token_ids if hasattr(token_ids, "__getitem__") else list(token_ids)
    try:
        ids = np.frombuffer(_array_of(entries), np.int64)  # checks the types of all entries, in C
    except (TypeError, OverflowError):
        for position, token in enumerate(entries):
            name = f"prompt_token_ids[{position}]"
            if is_boolean(token) or not is_integer(token):
                raise FieldTypeError(name, f"is {token!r:.200}; token ids are ints", token) from None
            if not -(2**63) <= int(token) < 2**63:
                raise FieldError(name, f"is {token}; token ids are much smaller", token) from None
        raise
    # booleans have become 0 and 1: refuse a mask in place of token ids
    for position in np.flatnonzero(ids <= 1).tolist():
        if is_boolean(entries[position]):
            field, token = f"prompt_token_ids[{position}]", entries[position]
            raise FieldTypeError(field, f"is {token!r}, a boolean; token ids are ints", token)
    return ids


def _kv_transfer_params(params: SamplingParams) -> dict[str, Any] | None:
    """Parameters for the KV connector, which validates them when the request is queued."""
    given = (params.extra_args or {}).get("kv_transfer_params")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise FieldTypeError("kv_transfer_params", f"is {given!r}; it must be an object", given)
    if params.n > 1:
        raise FieldError(
            "n", f"is {params.n}, and kv_transfer_params speak of the KV of one sequence; n must be 1", params.n
        )
    return given


def params_check(plan: EnginePlan) -> Callable[[SamplingParams], None]:
    """What an engine requires of a request's own logits processors, and of the parameters of its own.

    The result raises ValueError for a request that the engine cannot run.
    """
    crosses_processes = plan.executor == "mp"

    def check(params: SamplingParams) -> None:
        if params.logits_processors and plan.runner != "v1":
            raise FieldError(
                "logits_processors",
                f"is {params.logits_processors!r}, and Model Runner V2, which samples on the device, "
                "calls no functions; start the engine with model_runner='v1'",
                params.logits_processors,
            )
        if params.logits_processors and crosses_processes:
            try:
                pickle.dumps(params.logits_processors)
            except Exception as error:
                raise FieldError(
                    "logits_processors",
                    f"is {params.logits_processors!r}, which cannot be sent to the worker processes "
                    f"({error}); use functions of a module",
                    params.logits_processors,
                ) from error
        if params.extra_args and not plan.logits_processors:
            for name in params.extra_args:
                if name not in EXTRA_ARGS:
                    raise FieldError("extra_args", f"can hold {', '.join(EXTRA_ARGS)}, got {name!r}", name)
        for processor in plan.logits_processors:
            try:
                processor.validate_params(params)
            except (ValueError, TypeError):
                raise
            except Exception as error:
                raise ValueError(describe(processor, error)) from error

    return check

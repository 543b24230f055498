"""The compiler: constraints of requests become grammars, in threads beside the steps, once for equal constraints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetfoot.parsers.grammar import Rules, split_added
from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.structured.grammars import after_reasoning, make_grammar
from fleetfoot.structured.masks import Grammar, GrammarState, ReasoningEnd
from fleetfoot.structured.strings import new_matcher
from fleetfoot.structured.trial import GrammarTrial
from fleetfoot.structured.vocabulary import VocabularySource, plain_matcher
from fleetfoot.utils.validation import FieldError

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

TIMEOUT_S = 10.0
"""Seconds of a core in which a grammar must be compiled."""
_PATIENCE_S = 900.0  # how long a request waits by the clock: for the vocabulary, for grammars before, on a busy machine
_MAX_CACHED = 256
_MAX_CACHED_CHARS = 1 << 20
"""Most characters of the constraints whose grammars are cached; each takes up to 400 bytes."""
_NUM_THREADS = 4


class Vocabulary(NamedTuple):
    """A tokenizer, and how llguidance reads it."""

    tokenizer: Any  # as of `Grammar`
    source: VocabularySource
    text: Tokenizer


class GrammarCompiler:
    """Compiles constraints, and caches the results by content. Its methods may be called in any thread.

    Args:
        load_tokenizer: loads the tokenizer, when the first constraint needs it; None: there is none.
        vocab_size: of the model's logits, which may be larger than that of the tokenizer.
        eos_token_ids: tokens that end the output; allowed where the constraint is met.
        timeout_s: seconds of a core in which the trial must have compiled a grammar.
        trial: compiles each grammar before this process does; None: they come from a process that has done so.
        on_vocabulary: called before the vocabulary is read, once, in a thread.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer] | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        timeout_s: float = TIMEOUT_S,
        trial: GrammarTrial | None = None,
        on_vocabulary: Callable[[VocabularySource], object] = lambda _: None,
    ) -> None:
        self._load_tokenizer, self._on_vocabulary = load_tokenizer, on_vocabulary
        self._vocab_size, self.eos_token_ids = vocab_size, tuple(sorted(eos_token_ids))
        self._trial, self._timeout_s = trial, timeout_s
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "fleetfoot-grammars")
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._num_chars = 0  # of its keys

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a constraint. Waits for the thread that compiles it. Raises ValueError: it cannot be compiled,
        within the limits and for this tokenizer."""
        future = self.submit(params)
        try:
            return future.result(_PATIENCE_S)
        except TimeoutError:
            raise FieldError(
                "structured_outputs", f"was not compiled in {_PATIENCE_S:g} seconds, after others; send it later"
            ) from None

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Begin to compile, or find what was compiled before."""
        if self._load_tokenizer is None:
            raise FieldError("structured_outputs", "needs a tokenizer, and the engine has none (skip_tokenizer_init)")
        if not self.eos_token_ids:
            raise FieldError("structured_outputs", "needs an end token, and the model's configuration names none")
        key = repr([(name, getattr(params, name)) for name in StructuredOutputsParams.__slots__])
        with self._lock:
            future = self._cache.get(key)
            if future is None:
                future = self._cache[key] = self._threads.submit(self._compile, params)
                self._num_chars += len(key)
                while len(self._cache) > _MAX_CACHED or (self._num_chars > _MAX_CACHED_CHARS and len(self._cache) > 1):
                    oldest, _ = self._cache.popitem(last=False)
                    self._num_chars -= len(oldest)
            self._cache.move_to_end(key)
        return future

    def start(self, params: StructuredOutputsParams, *, min_tokens: int, ignore_eos: bool) -> GrammarState:
        """The state of a new sequence. Waits as `compile`, and raises as it."""
        return GrammarState(self.compile(params), self.eos_token_ids if ignore_eos else (), min_tokens)

    def close(self) -> None:
        """End the processes of the trial."""
        if self._trial is not None:
            self._trial.close()

    # --- in a thread ------------------------------------------------------------------------------------------------

    def _load_vocabulary(self) -> Vocabulary:
        """Takes about a second for 150,000 tokens."""
        with self._loading:
            if self._vocabulary is not None:
                return self._vocabulary
            assert self._load_tokenizer is not None
            tokenizer = self._load_tokenizer()
            source = VocabularySource(tokenizer.backend.to_str(), self._vocab_size, self.eos_token_ids)
            self._on_vocabulary(source)
            try:
                self._vocabulary = Vocabulary(source.read(), source, tokenizer)
            except Exception as error:
                raise FieldError("structured_outputs", f"cannot be used with this tokenizer: {error}") from error
            return self._vocabulary

    def _compile(self, params: StructuredOutputsParams) -> Any:
        try:
            return self._make(params)
        except ValueError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise FieldError("structured_outputs", f"cannot be compiled: {error!r:.500}") from error

    def _make(self, params: StructuredOutputsParams) -> Any:
        """The result of `compile`."""
        vocabulary = self._load_vocabulary()
        compiled: dict[str, Any] = {}

        def find_error(grammar: str) -> str:
            error = "" if self._trial is None else self._trial.run(grammar, self._timeout_s)
            if error:
                return error
            compiled[grammar] = plain_matcher(vocabulary.tokenizer, grammar)
            return str(compiled[grammar].get_error())

        reasoning, end, begin, most = None, params.reasoning_end, params.reasoning_begin, params.max_reasoning_tokens
        rules, encode = _rules_of(vocabulary.text), partial(vocabulary.text.encode, add_special_tokens=False)
        grammar = make_grammar(params, rules(), find_error)
        if end is not None and begin is not None and most is None:
            grammar = after_reasoning(grammar, begin, end, rules())
        elif end is not None:
            limit = () if most is None else (most, encode(begin or ""), encode(end))
            reasoning = ReasoningEnd(end.encode(), vocabulary.text.pieces.tables[False], *limit)
        matcher = new_matcher(vocabulary.tokenizer, grammar, compiled.get(grammar.text))
        beginning = matcher.deep_copy()
        has_tokens = any(beginning.compute_bitmask())
        if beginning.is_error() or not has_tokens:
            error = beginning.get_error().partition("\n")[0] or "no token can be the first"
            error = error.replace("NoExtensionBias", "every way to begin leads nowhere")
            raise FieldError("structured_outputs", f"has no output that fits it: {error:.300}")
        return Grammar(matcher, grammar, vocabulary.tokenizer, reasoning)


class GrammarChecker(GrammarCompiler):
    """Checks constraints for an engine in another process, which compiles them.

    It finds all errors but those that depend on the tokenizer, and does not read the vocabulary: during that second
    nothing else could run.
    """

    def _make(self, params: StructuredOutputsParams) -> Any:
        assert self._load_tokenizer is not None and self._trial is not None
        find_error = partial(self._trial.run, timeout_s=self._timeout_s)
        make_grammar(params, _rules_of(self._load_tokenizer())(), find_error)
        return SimpleNamespace(is_compiled=False)  # by the engine, as its client notes


def _rules_of(tokenizer: Tokenizer) -> Callable[[], Rules]:
    special_tokens, text_tokens = split_added(tokenizer.added_tokens_decoder)
    return partial(Rules, special_tokens, text_tokens=text_tokens)

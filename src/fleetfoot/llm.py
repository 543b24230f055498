"""`LLM`: offline inference. Signatures follow vLLM's."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast

from fleetfoot.compat.names import check_call_keywords
from fleetfoot.compat.paths import missing_attribute
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.beam_search import BeamSearchOutput, search
from fleetfoot.engine.calls import EngineCalls
from fleetfoot.engine.chat import ChatCalls, ToolUse
from fleetfoot.engine.chat_messages import read_conversation, template_variables
from fleetfoot.engine.engine import LLMEngine, drain_deadline
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.metrics import Metric
from fleetfoot.engine.pooling import PoolingCalls, Progress
from fleetfoot.engine.sleep import Suspension
from fleetfoot.engine.stats import EngineStats
from fleetfoot.engine.turns import Turns
from fleetfoot.inputs import ChatMessage, PromptType
from fleetfoot.outputs import Logprob, PoolingRequestOutput, RequestOutput
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, is_integer
from fleetfoot.utils.process import SHORT_COLLECTIONS, StopSignal, deferred_interrupts
from fleetfoot.utils.progress import loading_bar, progress_bar
from fleetfoot.utils.validation import FieldError, FieldTypeError

if TYPE_CHECKING:
    from fleetfoot.engine.arg_utils import EngineArgs
    from fleetfoot.tokenizer.tokenizer import Tokenizer


class LLM(ChatCalls, PoolingCalls, EngineCalls):
    """A model for offline inference. Use it as a context manager, or call `shutdown` to release its memory.

    Threads can share it: their calls run as one batch. A forked process cannot: its calls raise `EngineDeadError`.

    Args:
        model: a checkpoint folder or a hub id; None: the embedded model.
        keywords: the fields of `EngineConfig`.

    Raises:
        TypeError: an unknown keyword; the message lists near matches, or what to use instead of a keyword of vLLM's.
        ValueError: a value is out of range, or settings, model and machine do not fit together.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **keywords: Any) -> None:
        if model is not None:
            keywords["model"] = model
        with loading_bar():
            self.config = EngineConfig.from_keywords(keywords, owner="LLM")
            self.llm_engine = LLMEngine.from_config(self.config)
        self._is_closing = False
        self._numbers = count()
        self._turns = Turns(lambda: self.llm_engine.can_step)
        self._calls: dict[str, _Call] = {}  # request id -> the call that waits for its output

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine with the settings of `EngineArgs`. Raises as the class."""
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, which run as one batch. Outputs are in the order of the prompts.

        Args:
            prompts: text, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, token ids, or a list of these. The
                dictionaries can have a ``cache_salt``: only prompts with equal salts share cached KV.
            sampling_params: for all prompts, or one for each; None: `get_default_sampling_params`.
            use_tqdm: show a progress bar on standard error; or a callable that returns one, such as ``tqdm``.
            priority: one for each prompt, lower runs sooner; needs ``scheduling_policy="priority"``.
            unknown: refused, except neutral values of vLLM's keywords (``lora_request=None``).

        Raises:
            ValueError, TypeError: a prompt, its parameters or a keyword is refused; nothing was generated.
            EngineDeadError: the engine has failed.
            KeyboardInterrupt: Ctrl-C. It is raised at the end of the current step; the requests of this call are
                aborted, and the engine remains usable. A second Ctrl-C is raised at once, and ends the engine.
        """
        check_call_keywords("LLM.generate", self.generate, unknown)
        self._check_generates("LLM.generate")
        many, is_batch = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_for_each("sampling_params", sampling_params, many)
        if priority is not None and self.config.scheduling_policy != "priority":
            raise FieldError("priority", "was given, but scheduling_policy is 'fcfs'; set scheduling_policy='priority'")
        priorities = _one_for_each("priority", 0 if priority is None else priority, many)
        return self._run(_Call(many, params, priorities, is_batch), use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tool_choice: str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        thinking_token_budget: int | None = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Generate replies to one conversation or many, rendered with a chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` dictionaries, or a list of such lists.
            sampling_params, use_tqdm: as of `generate`.
            lora_request, chat_template_content_format: only vLLM's defaults are accepted.
            chat_template: Jinja source, or the name of one of the model's templates.
            tools: passed to the template; `parse_chat` finds the calls in an output.
            chat_template_kwargs: more variables of the template; they may set the arguments before, too.
            tool_choice: ``auto``, ``none``, ``required``, or ``{"type": "function", "function": {"name": ...}}``, which
                a grammar enforces, as it does the arguments of strict tools.
            parallel_tool_calls: whether there can be several calls.
            thinking_token_budget: the most tokens of reasoning; its end is forced then.
            unknown: as of `generate`.

        Raises:
            ValueError, TypeError, EngineDeadError, KeyboardInterrupt: as of `generate`.
        """
        vllm_only = {"lora_request": lora_request, "chat_template_content_format": chat_template_content_format}
        check_call_keywords("LLM.chat", self.chat, vllm_only | unknown)
        self._check_generates("LLM.chat")
        tokenizer = self.get_tokenizer()
        given = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        variables = template_variables(given | {"tools": tools, "chat_template": chat_template}, chat_template_kwargs)
        is_batch = isinstance(messages, list | tuple) and any(isinstance(entry, list | tuple) for entry in messages)
        use = ToolUse.for_chat(variables["tools"], tool_choice, is_parallel=parallel_tool_calls)
        variables["tools"] = variables["tools"] if tool_choice != "none" else None
        many: Any = messages if is_batch else [messages]
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = _one_for_each("sampling_params", default, many)
        is_cut = any(getattr(params, "truncate_prompt_tokens", None) is not None for params in each)
        prompts: list[PromptType] = []
        adapted: list[SamplingParams] = []
        for index, conversation in enumerate(many):
            with _naming(f"messages[{index}]" * is_batch):
                conversation = read_conversation(conversation)
                text = tokenizer.apply_chat_template(conversation, tokenize=False, **variables)
                if not isinstance(text, str):
                    raise FieldError("messages", "must be one conversation or a list of them, not lists in such a list")
                ids = self.llm_engine.input_processor.tokenize(text, is_cut=is_cut, add_special_tokens=False)
            token_ids = ids.tolist()
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
            options = (variables["chat_template"], use, token_ids, thinking_token_budget)
            adapted.append(self._chat_params(each[index], *options))
        return self.generate(prompts if is_batch else prompts[0], adapted, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most probable continuations of each prompt; as `generate` else.

        ``2 * beam_width`` is at most the engine's ``max_logprobs``. ``concurrency_limit`` has no effect.
        """
        check_call_keywords("LLM.beam_search", self.beam_search, {"lora_request": lora_request})
        self._check_generates("LLM.beam_search")
        if not isinstance(params, BeamSearchParams):
            raise FieldTypeError("params", f"is {params!r}; it must be a BeamSearchParams", params)
        engine, tokenizer, roots = self.llm_engine, self.get_tokenizer(), []
        options = SamplingParams(max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature)
        many, is_batch = _as_list(prompts)
        for index, prompt in enumerate(many):
            with _naming(f"prompts[{index}]" * is_batch):
                roots.append(engine.process_inputs("beam search", prompt, options))
                room = engine.input_processor.max_model_len - len(roots[-1].prompt_token_ids)
                if params.max_tokens > room:
                    raise FieldError(
                        "max_tokens",
                        f"is {params.max_tokens}, but the prompt leaves room for {room} tokens",
                        params.max_tokens,
                    )
        with progress_bar(use_tqdm, total=params.max_tokens, description="Beam search") as advance:

            def step(beams: list[tuple[int, list[int]]]) -> list[dict[int, Logprob]]:
                inputs: list[Any] = [
                    {"prompt_token_ids": tokens, "cache_salt": roots[index].cache_salt} for index, tokens in beams
                ]
                outputs = self.generate(inputs, options, use_tqdm=False)
                advance(len(outputs))
                return [entries for output in outputs for entries in output.outputs[0].logprobs or ()]

            prompt_token_ids = [root.prompt_token_ids.tolist() for root in roots]
            found = search(step, prompt_token_ids, params, engine.input_processor.eos_token_ids)
        for beam in (beam for output in found for beam in output.sequences):
            beam.text = tokenizer.decode(beam.tokens)
        return found

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: the engine runs on token ids only.
        """
        if self.llm_engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer: it was made with skip_tokenizer_init=True")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters of `generate`, as a new object.

        They are ``SamplingParams()`` with the overrides of the model's ``generation_config.json`` and of the settings
        ``generation_config`` and ``override_generation_config`` (`fleetfoot.sampling.defaults`).
        """
        return self.llm_engine.get_default_sampling_params()

    def stats(self) -> EngineStats:
        """Counters since the start, and the scheduler's state."""
        return self.llm_engine.stats()

    def get_metrics(self) -> list[Metric]:
        """See `LLMEngine.get_metrics`."""
        return self.llm_engine.get_metrics()

    @property
    def model_config(self) -> SimpleNamespace:
        """See `LLMEngine.model_config`."""
        return self.llm_engine.model_config

    def _held(self, function: Callable[[Any], Any], mode: str) -> Any:
        return self.run_held(function, mode)

    def run_held(self, function: Callable[[LLMEngine], Any], mode: str = "drain") -> Any:
        """Call ``function(engine)`` between steps, when no step is in flight; see `LLMEngine.hold`. Calls of other
        threads go on meanwhile.

        Returns or raises what the function does. Raises EngineDeadError, KeyboardInterrupt: as `generate`.
        """
        self._check_usable()
        engine = self.llm_engine
        with SHORT_COLLECTIONS, deferred_interrupts() as interrupts:
            with self._turns.take():
                hold = engine.hold(lambda: function(engine), mode)
            try:
                while not hold.is_done:
                    interrupts.check()
                    with self._turns.take(lambda: hold.is_done or interrupts.is_set, is_step=True) as has_turn:
                        if has_turn:
                            self._step()
            finally:
                with self._turns.take():
                    engine.cancel_hold(hold)
        return hold.result()

    def is_sleeping(self) -> bool:
        """See `LLMEngine.is_sleeping`."""
        return self.llm_engine.is_sleeping()

    def is_paused(self) -> bool:
        """Whether generation is paused, or the engine sleeps."""
        return self.llm_engine.is_paused

    @property
    def suspension(self) -> Suspension:
        """See `EngineCalls`."""
        return self.llm_engine.suspension

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("LLM", name)

    def shutdown(self, drain: bool | float = False) -> None:
        """Release all memory, after a step of another thread. Does nothing when called again or in a forked process.

        Args:
            drain: let requests of other threads end first: True, without a limit, or for at most so many seconds; then
                they end as aborted. False: their calls raise EngineDeadError. New calls raise it at once.

        Raises:
            ValueError: ``drain`` is not a number of seconds.
        """
        deadline = drain_deadline(drain)
        if self.llm_engine.is_foreign:
            return
        self._is_closing, engine = bool(drain), self.llm_engine
        try:
            if drain:
                self._drain(deadline)
        finally:
            with self._turns.take():
                if drain and not engine.is_dead:
                    self._hand_out(engine.abort_all())
                engine.shutdown()
            self._is_closing = False  # the engine refuses from now on

    def _drain(self, deadline: float) -> None:
        """Step until no request is left, the deadline, or Ctrl-C."""
        engine = self.llm_engine
        with contextlib.suppress(EngineDeadError), deferred_interrupts() as interrupts:
            is_over = lambda: not engine.can_step or interrupts.is_set or time.monotonic() >= deadline  # noqa: E731
            while not is_over():
                with self._turns.take(is_over, is_step=True) as has_turn:
                    if has_turn:
                        self._step()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # --- running ------------------------------------------------------------------------------------------------------

    def _pool(self, prompts: Any, params: Any, use_tqdm: Progress) -> list[PoolingRequestOutput]:
        many, is_batch = _as_list(prompts)
        each = _one_for_each("pooling_params", params, many)
        return self._run(_Call(many, each, [0] * len(many), is_batch), use_tqdm)

    def _run(self, call: _Call, use_tqdm: bool | Callable[..., Any]) -> list[Any]:
        self._check_usable()
        if why := self.suspension.reason:  # it would wait for a thread that may never come
            raise RuntimeError(why)
        if not callable(use_tqdm):
            use_tqdm = bool(use_tqdm) and not self._calls  # another thread may show its bar
        # an interrupted step would end the engine
        with SHORT_COLLECTIONS, deferred_interrupts() as interrupts:
            try:
                self._add(call, interrupts)
                with progress_bar(
                    use_tqdm, total=len(call.prompts), description="Pooling" if self._is_pooling else "Generating"
                ) as advance:
                    while True:
                        for output in call.outputs[call.num_shown :]:
                            call.num_shown += 1
                            advance(output.metrics.num_generation_tokens)
                        interrupts.check()
                        if call.num_shown == len(call.prompts):
                            break
                        until = lambda: len(call.outputs) > call.num_shown or interrupts.is_set  # noqa: E731
                        with self._turns.take(until, is_step=True) as has_turn:
                            if has_turn:
                                self._step()
            except BaseException:  # a refused prompt, a failure, Ctrl-C: remove all requests of this call
                with self._turns.take():
                    self.llm_engine.discard(call.request_ids)
                    self._calls = {key: other for key, other in self._calls.items() if other is not call}
                raise
            finally:
                with self._turns.take():
                    self.llm_engine.report_finished()
        by_id = {output.request_id: output for output in call.outputs}
        return [by_id[request_id] for request_id in call.request_ids]

    def _add(self, call: _Call, interrupts: StopSignal) -> None:
        """Add the requests of a call, at once or, if another thread steps, together after its step."""
        engine, num_tokens = self.llm_engine, 0
        previous = checked = None
        has_stepped = False
        waiting: list[EngineRequest] = []
        for index, (prompt, given, priority) in enumerate(zip(call.prompts, call.params, call.priorities, strict=True)):
            if checked is None or given is not previous:  # shared parameters are validated once
                name = "pooling_params" if isinstance(given, PoolingParams) else "sampling_params"
                with _naming(f"{name}[{index}]" * any(other is not given for other in call.params)):
                    previous, checked = given, engine.input_processor.check_params(given)
                if isinstance(checked, SamplingParams):
                    checked.output_kind = RequestOutputKind.FINAL_ONLY
            request_id = self._new_request_id()
            with _naming(f"prompts[{index}]" * call.is_batch):
                request = engine.process_inputs(request_id, prompt, checked, priority=priority, params_checked=True)
            waiting.append(request)
            if len(call.prompts) == index + 1 or self._turns.owner is None:
                with self._turns.take():
                    for request in waiting:
                        call.request_ids.append(request.request_id)
                        with _naming(f"prompts[{len(call.request_ids) - 1}]" * call.is_batch):
                            engine.submit(request)
                        num_tokens += len(request.prompt_token_ids)
                        self._calls[request.request_id] = call
                    waiting.clear()
                    if not has_stepped and engine.fills_first_step(num_tokens):
                        has_stepped = True  # the device computes while the other prompts are added
                        self._step()
            interrupts.check()

    @property
    def _is_pooling(self) -> bool:
        return self.llm_engine.input_processor.pooling is not None

    def _check_generates(self, call: str) -> None:
        if self._is_pooling:
            raise FieldError(call, "needs a model that generates, and this one pools; set runner='generate'")

    def _check_usable(self) -> None:
        """Raise EngineDeadError in a forked process, and RuntimeError in what interrupts a step of this thread."""
        self.llm_engine.check_process()  # before the lock, which a thread of the parent may hold
        if self._is_closing:
            raise EngineDeadError("the engine was shut down")
        if self._turns.owner == threading.get_ident():
            raise RuntimeError("a signal handler or __del__ has called the LLM during a step; call it after the step")

    def _step(self) -> None:
        """Run a step; every call gets its finished outputs. The engine may have requests of no call."""
        self._hand_out(self.llm_engine.step())

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished and (call := self._calls.pop(output.request_id, None)) is not None:
                call.outputs.append(output)

    def _new_request_id(self) -> str:
        """An unused number; requests that were added directly to the engine may have some."""
        return next(request_id for request_id in map(str, self._numbers) if not self.llm_engine.has_request(request_id))


@dataclass(slots=True)
class _Call:
    """A call of `generate`: its arguments, the ids of its requests, and the outputs of those that have finished."""

    prompts: list[PromptType]
    params: Sequence[Any]
    priorities: Sequence[int]
    is_batch: bool
    request_ids: list[str] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    num_shown: int = 0


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """What the block refuses is refused with the place, if there is one, before the message."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if not place:
            raise
        if isinstance(error, FieldError):
            name = place.partition("[")[0]
            is_same = error.field.partition("[")[0] == name  # of the entry instead of the list
            raise error.at(place + error.field.removeprefix(name) if is_same else f"{place}.{error.field}") from error
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{place}: {error}") from error


def _as_list(prompts: PromptType | Sequence[PromptType]) -> tuple[list[PromptType], bool]:
    """One prompt or many as a list, and whether many were given."""
    is_bytes = isinstance(prompts, bytes | bytearray | memoryview)
    num_dims = None if is_bytes else getattr(prompts, "ndim", None)  # of an array
    if isinstance(prompts, str | dict) or num_dims == 1:
        return [cast("PromptType", prompts)], False
    if num_dims != 2 and (is_bytes or not isinstance(prompts, Sequence)):
        raise FieldTypeError("prompts", f"is a {type(prompts).__name__}; it must be a prompt or a list of prompts")
    many = list(prompts)
    is_one = bool(many) and all(map(is_integer, many))
    return cast("list[PromptType]", [many] if is_one else many), not is_one


def _one_for_each(name: str, value: Any, prompts: list[PromptType]) -> Sequence[Any]:
    if getattr(value, "ndim", 0) == 1:  # of an array
        value = value.tolist()
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise FieldError(name, f"has {len(value)} entries for {len(prompts)} prompts; give one, or one for each")
    return value

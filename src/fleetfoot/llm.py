"""`LLM`: text in, text out, offline. Signatures follow vLLM's, so that a script moves over by changing its import."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Container, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.vllm_names import check_call_keywords
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.stats import EngineStats
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import ChatMessage, PromptType
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.process import StopSignal, deferred_interrupts, short_collections
from fleetfoot.utils.progress import ProgressBar, progress_bar

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer


class LLM:
    """A model, ready to generate.

    Args:
        model: a checkpoint folder or a hub id; without it the embedded model runs.
        keywords: the fields of `EngineConfig`.

    Raises:
        TypeError: an unknown keyword; near matches are listed, or what to do where vLLM knows it.
        ValueError: a value is out of range, or settings, model and machine do not fit together.

    Use it as a context manager, or call `shutdown`, to give its memory back.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **keywords: Any) -> None:
        if model is not None:
            keywords["model"] = model
        self.config = EngineConfig.from_keywords(keywords, owner="LLM")
        self.llm_engine = LLMEngine.from_config(self.config)
        self._num_requests = 0

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; they run together, and the outputs come in the order of the prompts.

        Args:
            prompts: text, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, token ids, or a list of these. The
                dictionaries can have a ``cache_salt``: only prompts with the same one share KV.
            sampling_params: for all, or one for each; None: `get_default_sampling_params`.
            use_tqdm: show a progress bar on standard error; or a callable that makes one, as ``tqdm`` does.
            priority: one for each prompt, lower is sooner; needs ``scheduling_policy="priority"``.
            unknown: refused, but for keywords of vLLM's that ask for nothing (``lora_request=None``).

        Raises:
            ValueError, TypeError: a prompt, its parameters or a keyword were refused; nothing was generated.
            EngineDeadError: the engine has failed.
            KeyboardInterrupt: Ctrl-C, at the end of the step that it came in. The requests of this call are aborted,
                and the engine is ready for the next one. A second Ctrl-C does not wait, and ends the engine.
        """
        check_call_keywords("LLM.generate", self.generate, unknown)
        many = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_for_each("sampling_params", sampling_params, many)
        if priority is not None and self.config.scheduling_policy != "priority":
            raise ValueError("priority was given, but scheduling_policy is 'fcfs'; set scheduling_policy='priority'")
        priorities = _one_for_each("priority", priority if priority is not None else 0, many)
        return self._run(many, params, priorities, use_tqdm)

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
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Generate replies to one conversation or many, through the model's own chat template or the one given.

        Args:
            messages: ``{"role": ..., "content": ...}`` dictionaries, or a list of such lists.
            sampling_params, use_tqdm: as of `generate`.
            lora_request, chat_template_content_format: stand where vLLM has them; their defaults are all they can be.
            chat_template: Jinja source, or the name of one of the model's templates.
            tools, chat_template_kwargs: for the template.
            unknown: as of `generate`.

        Raises:
            ValueError, TypeError, EngineDeadError, KeyboardInterrupt: as of `generate`.
        """
        asked = {"lora_request": lora_request, "chat_template_content_format": chat_template_content_format}
        check_call_keywords("LLM.chat", self.chat, asked | unknown)
        if not messages:
            raise ValueError("messages is empty; a conversation needs at least one message")
        conversations = cast(
            "list[Sequence[ChatMessage]]", [messages] if isinstance(messages[0], dict) else list(messages)
        )
        tokenizer = self.get_tokenizer()
        prompts: list[PromptType] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: the engine runs on token ids alone.
        """
        if self.llm_engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer: it was made with skip_tokenizer_init=True")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none, as a new object.

        The model's ``generation_config.json`` and the settings ``generation_config`` and ``override_generation_config``
        say what differs from ``SamplingParams()`` (`fleetfoot.sampling.defaults`).
        """
        return self.llm_engine.get_default_sampling_params()

    def stats(self) -> EngineStats:
        """Counters of the engine, and its state now."""
        return self.llm_engine.stats()

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; with ``reset_connector`` what a KV connector has saved is not loaded any more."""
        self.llm_engine.reset_prefix_cache(reset_connector=reset_connector)
        return True

    def shutdown(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- running ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[PromptType],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        request_ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        has_begun, engine = False, self.llm_engine
        before = engine.num_prompt_tokens
        # A step that Ctrl-C cuts short would end the engine.
        with short_collections(), deferred_interrupts() as interrupts:
            try:
                former = checked = None
                for prompt, wanted, priority in zip(prompts, params, priorities, strict=True):
                    if checked is None or wanted is not former:  # what prompts share is checked once
                        former, final = wanted, _final_only(wanted)
                        checked = engine.check_params(final)
                    request_ids.append(self._new_request_id())
                    engine.add_request(request_ids[-1], prompt, final, priority=priority, checked=checked)
                    if not has_begun and engine.may_begin(engine.num_prompt_tokens - before):
                        has_begun = True  # a step that computes while the others are added
                        finished.update(self._step(request_ids))
                    interrupts.check()
                outputs = self._finish(request_ids, finished, use_tqdm, interrupts)
                engine.report_finished()
                return outputs
            except BaseException:  # a refused prompt, a failure, Ctrl-C: nothing of this call may live on in the engine
                engine.discard(request_ids)
                engine.report_finished()
                raise

    def _finish(
        self,
        request_ids: list[str],
        finished: dict[str, RequestOutput],
        use_tqdm: bool | Callable[..., Any],
        interrupts: StopSignal,
    ) -> list[RequestOutput]:
        """Step until these requests have ended; their last outputs in order.

        Args:
            finished: of those that have ended already.
        """
        mine = frozenset(request_ids)
        with progress_bar(use_tqdm, total=len(request_ids), description="Generating") as bar:
            for output in finished.values():
                _advance(bar, output)
            while len(finished) < len(request_ids):
                for request_id, output in self._step(mine).items():
                    finished[request_id] = output
                    _advance(bar, output)
                interrupts.check()
        return [finished[request_id] for request_id in request_ids]

    def _step(self, mine: Container[str]) -> dict[str, RequestOutput]:
        """The last outputs of those of ``mine`` that end with a step; strangers may have been added by hand."""
        outputs = self.llm_engine.step()
        return {output.request_id: output for output in outputs if output.finished and output.request_id in mine}

    def _new_request_id(self) -> str:
        """A number that no request has, one that was added by hand included."""
        while self.llm_engine.has_request(str(self._num_requests)):
            self._num_requests += 1
        self._num_requests += 1
        return str(self._num_requests - 1)


def _advance(bar: ProgressBar, output: RequestOutput) -> None:
    bar.update(1, tokens=sum(len(completion.token_ids) for completion in output.outputs))


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | dict):
        return [cast("PromptType", prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise TypeError(f"prompts is a {type(prompts).__name__}; it must be a prompt or a list of prompts")
    many = list(prompts)
    if many and all(isinstance(entry, int) for entry in many):
        return [cast("PromptType", many)]
    return cast("list[PromptType]", many)


def _one_for_each(name: str, value: Any, prompts: list[PromptType]) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValueError(f"{name} has {len(value)} entries for {len(prompts)} prompts; give one, or one for each")
    return value


def _final_only(params: SamplingParams) -> SamplingParams:
    """The caller sees the end alone, so nothing is made up for it on the way."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params is {params!r}; it must be a SamplingParams or a list of them")
    final = copy.copy(params)  # admission checks and keeps its own
    final.output_kind = RequestOutputKind.FINAL_ONLY
    return final

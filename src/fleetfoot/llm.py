"""`LLM`: offline inference. Signatures follow vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, cast

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.vllm_names import check_call_keywords
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.stats import EngineStats
from fleetfoot.inputs import ChatMessage, PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.process import deferred_interrupts, progress_bar, short_collections

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer


class LLM:
    """A model for offline inference. Use it as a context manager, or call `shutdown` to release its memory.

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
        many = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_for_each("sampling_params", sampling_params, many)
        if priority is not None and self.config.scheduling_policy != "priority":
            raise ValueError("priority was given, but scheduling_policy is 'fcfs'; set scheduling_policy='priority'")
        return self._run(many, params, _one_for_each("priority", 0 if priority is None else priority, many), use_tqdm)

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
        """Generate replies to one conversation or many, rendered with a chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` dictionaries, or a list of such lists.
            sampling_params, use_tqdm: as of `generate`.
            lora_request, chat_template_content_format: only vLLM's defaults are accepted.
            chat_template: Jinja source, or the name of one of the model's templates.
            tools, chat_template_kwargs: passed to the template.
            unknown: as of `generate`.

        Raises:
            ValueError, TypeError, EngineDeadError, KeyboardInterrupt: as of `generate`.
        """
        vllm_only = {"lora_request": lora_request, "chat_template_content_format": chat_template_content_format}
        check_call_keywords("LLM.chat", self.chat, vllm_only | unknown)
        if not messages:
            raise ValueError("messages is empty; a conversation needs at least one message")
        conversations: Any = [messages] if isinstance(messages[0], dict) else messages
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
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

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

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; with ``reset_connector`` also KV that a KV connector has saved."""
        self.llm_engine.reset_prefix_cache(reset_connector=reset_connector)
        return True

    def shutdown(self) -> None:
        """Release all memory. Further calls do nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # --- running ------------------------------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[PromptType],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        engine, before = self.llm_engine, self.llm_engine.num_prompt_tokens
        request_ids: dict[str, None] = {}  # an ordered set
        finished: dict[str, RequestOutput] = {}
        previous = checked = None
        # an interrupted step would end the engine
        with short_collections(), deferred_interrupts() as interrupts:
            try:
                has_stepped = False
                for prompt, given, priority in zip(prompts, params, priorities, strict=True):
                    if checked is None or given is not previous:  # shared parameters are validated once
                        previous, checked = given, engine.input_processor.check_params(given)
                        checked.output_kind = RequestOutputKind.FINAL_ONLY
                    request_id = self._new_request_id()
                    request_ids[request_id] = None
                    engine.add_request(request_id, prompt, checked, priority=priority, params_checked=True)
                    if not has_stepped and engine.fills_first_step(engine.num_prompt_tokens - before):
                        has_stepped = True  # the device computes while the other prompts are added
                        finished |= self._step(request_ids)
                    interrupts.check()
                with progress_bar(use_tqdm, total=len(request_ids), description="Generating") as advance:
                    for output in finished.values():
                        advance(output.metrics.num_generation_tokens)
                    while len(finished) < len(request_ids):
                        for request_id, output in self._step(request_ids).items():
                            finished[request_id] = output
                            advance(output.metrics.num_generation_tokens)
                        interrupts.check()
            except BaseException:  # a refused prompt, a failure, Ctrl-C: remove all requests of this call
                engine.discard(request_ids)
                raise
            finally:
                engine.report_finished()
        return [finished[request_id] for request_id in request_ids]

    def _step(self, request_ids: Container[str]) -> dict[str, RequestOutput]:
        """Run a step; returns the outputs of ``request_ids`` that finish. The engine may have other requests."""
        outputs = self.llm_engine.step()
        return {output.request_id: output for output in outputs if output.finished and output.request_id in request_ids}

    def _new_request_id(self) -> str:
        """An unused number; requests that were added directly to the engine may have some."""
        while self.llm_engine.has_request(str(self._num_requests)):
            self._num_requests += 1
        self._num_requests += 1
        return str(self._num_requests - 1)


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | dict):
        return [cast("PromptType", prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise TypeError(f"prompts is a {type(prompts).__name__}; it must be a prompt or a list of prompts")
    many = list(prompts)
    is_one = bool(many) and all(isinstance(entry, int) for entry in many)
    return cast("list[PromptType]", [many] if is_one else many)


def _one_for_each(name: str, value: Any, prompts: list[PromptType]) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValueError(f"{name} has {len(value)} entries for {len(prompts)} prompts; give one, or one for each")
    return value

"""Engines for tests: around a tiny checkpoint, or around an executor that plays a script instead of a model."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.input_processor import InputProcessor
from fleetfoot.engine.restart import Rebuild
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig
from fleetfoot.tokenizer.tokenizer import Tokenizer
from tests.helpers.checkpoints import TINY, make_checkpoint

TEXT_MODEL: dict[str, Any] = TINY | {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
"""A tiny model that fits the embedded tokenizer. Its weights are wide, so that its words vary."""

EOS = 1
"""Of TEXT_MODEL."""


def make_text_checkpoint(folder: Path, model_type: str = "llama", **fields: Any) -> Any:
    """A random float32 checkpoint with the embedded model's tokenizer; returns the reference model."""
    reference = make_checkpoint(folder, model_type, **{**TEXT_MODEL, **fields})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model_path() / name, folder / name)
    return reference


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit the tensors of a checkpoint of one file, by name."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids; the first few of a vocabulary, which are special, are left out."""
    return torch.randint(5, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class ScriptedExecutor:
    """Returns scripted tokens instead of computing any.

    Args:
        script: request id -> its output tokens; requests that are not in it count up from 10.
        before_step: called with each step before it runs; what it raises, the step raises.
    """

    runner_name = "scripted"

    def __init__(
        self,
        script: Mapping[str, Sequence[int]] | None = None,
        before_step: Callable[[SchedulerOutput], None] | None = None,
    ) -> None:
        self.script = dict(script or {})
        self.before_step = before_step
        self.is_shut_down = False
        self.num_steps = 0
        self._rows: dict[int, NewRequest] = {}
        self._computed: dict[int, int] = {}
        self._step: SchedulerOutput | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if self.before_step is not None:
            self.before_step(scheduler_output)
        for _, row in scheduler_output.finished:
            del self._rows[row]
        for request in scheduler_output.new_requests:
            self._rows[request.row] = request
        self._step = scheduler_output
        self.num_steps += 1

    def sample_tokens(self, grammar_output: object | None) -> ModelRunnerOutput:
        assert self._step is not None
        step, self._step = self._step, None
        sampled = []
        for row in step.rows[: step.num_sampled]:
            request = self._rows[row]
            position = len(request.token_ids) - request.num_prompt_tokens
            script = self.script.get(request.request_id)
            # a step may be in flight behind the request's end; its token is discarded
            token = 10 + position if script is None else script[position] if position < len(script) else 0
            request.token_ids.append(token)
            sampled.append([token])
        return ModelRunnerOutput(sampled)

    def shutdown(self) -> None:
        self.is_shut_down = True


def scripted_engine(
    executor: Any, *, tokenizer: Tokenizer | None = None, vocab_size: int = 2048, max_model_len: int = 128,
    depth: int = 0, connector: SchedulerConnector | None = None, clock: Callable[[], float] = time.perf_counter,
    rebuild: Rebuild | None = None, max_restarts: int = 16, **limits: Any,
) -> LLMEngine:  # fmt: skip
    """The engine above an executor, with limits as in `SchedulerConfig`; ``depth`` and ``clock`` as in `EngineCore`;
    ``rebuild`` as in `LLMEngine`."""
    sizes = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    scheduler = Scheduler(SchedulerConfig(**{**sizes, **limits}), connector=connector)
    facts: dict[str, Any] = {"vocab_size": vocab_size, "max_model_len": max_model_len, "max_logprobs": 20, "seed": 0}
    processor = InputProcessor(**facts, eos_token_ids=[EOS], tokenizer=tokenizer)
    core = EngineCore(scheduler, executor, StatsCollector(), depth=depth, clock=clock)
    return LLMEngine(core, processor, tokenizer, rebuild=rebuild, max_restarts=max_restarts)


def make_engine(folder: Path, **keywords: Any) -> LLMEngine:
    """The real engine on a checkpoint, on a CPU, small unless ``keywords`` differ."""
    defaults = {"device": "cpu", "max_num_seqs": 8}
    return LLMEngine.from_config(EngineConfig(model=str(folder), **{**defaults, **keywords}))


def drain(engine: LLMEngine) -> list[RequestOutput]:
    """Step until nothing is left, checking integrity after each step; all outputs in order."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check_integrity()
    return outputs


def run_requests(engine: LLMEngine, requests: Mapping[str, tuple[Any, SamplingParams]]) -> dict[str, RequestOutput]:
    """Add requests (id -> prompt, parameters) together; their last outputs by id."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    finished = {output.request_id: output for output in drain(engine) if output.finished}
    assert finished.keys() == requests.keys()
    return finished

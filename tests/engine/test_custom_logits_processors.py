"""Custom logits processors: functions of a request, and classes of an engine, on Model Runner V1."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fleetfoot import LLM, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.plan import logits_processors as plan_processors
from fleetfoot.sampling.custom_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [8, 9], [10, 11, 12, 13, 14])]


def only(token: int) -> Any:
    def keep(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(logits, float("-inf"))
        kept[(token + len(output)) % 100] = logits[token]
        return kept

    return keep


def by_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return only(prompt[-1])(output, logits)


def fails(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) == 2:
        raise KeyError("lost")
    return logits


class Target(LogitsProcessor):
    """Restricts each request with ``extra_args["target"]`` to that token."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("target", 0), int):
            raise ValueError("target must be an int")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.targets.pop(index, None)  # a new request may have the index of one that is gone
            if params.extra_args is not None:
                self.targets[index] = params.extra_args["target"]
        for first, second, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            if first in self.targets:
                self.targets[second] = self.targets.pop(first)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, token in self.targets.items():
            kept = logits[index, token].clone()
            logits[index] = float("-inf")
            logits[index, token] = kept
        return logits


class AddedFirst(Target):
    """Takes the changes in the order of vLLM's own function."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index, params, _, _ in batch_update.added:
            self.targets.pop(index, None)
            if params.extra_args is not None:
                self.targets[index] = params.extra_args["target"]
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for first, second, _ in batch_update.moved:
            if (target := self.targets.pop(first, None)) is not None:
                self.targets[second] = target


class Updated(Target):
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        has_changed = process_dict_updates(self.targets, batch_update, self.target_of)
        assert has_changed == (batch_update is not None)

    @staticmethod
    def target_of(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> int | None:
        return (params.extra_args or {}).get("target")


class Adapted(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return None if params.extra_args is None else only(params.extra_args["target"])


class Sharp(LogitsProcessor):
    """Draws the most probable token; sees logits divided by the temperature."""

    largest: ClassVar[list[float]] = []

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.largest.append(float(logits.max()))
        return torch.where(logits == logits.max(1, keepdim=True).values, logits, float("-inf"))


class Faulty(Target):
    """Raises in ``extra_args["fails"]``, for the requests that have it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs == 256
        assert isinstance(vllm_config.model_config.max_model_len, int)
        super().__init__(vllm_config, device, is_pin_memory)
        self.fails: dict[int, str] = {}

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        super().update_state(batch_update)
        process_dict_updates(self.fails, batch_update, lambda params, *_: (params.extra_args or {}).get("fails"))
        self.check("update_state")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits = super().apply(logits)
        self.check("apply")
        return logits

    def check(self, place: str) -> None:
        if place in self.fails.values():
            raise RuntimeError(f"in {place}")


class FaultyInBatch(Faulty):
    def check(self, place: str) -> None:
        if len(self.targets) > 1:
            raise RuntimeError("two")


class FaultyAdapter(Adapted):
    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        match (params.extra_args or {}).get("fails"):
            case "update_state":
                raise RuntimeError("in update_state")
            case "apply":
                return lambda output, logits: [][0]
            case "shape":
                return lambda output, logits: logits[:1]
        return super().new_req_logits_processor(params)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True} | more)


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_states_of_requests_that_move() -> None:
    new = [(1, greedy(), None, []), (2, greedy(), None, [])]
    states = {0: "a", 1: "b", 3: "d"}
    assert not process_dict_updates(states, None, lambda *_: "x")
    assert process_dict_updates(states, BatchUpdate(4, [0], new, []), lambda params, *_: "new")
    assert states == {1: "new", 2: "new", 3: "d"}
    moved = [(3, 0, MoveDirectionality.UNIDIRECTIONAL), (1, 4, MoveDirectionality.SWAP)]
    assert process_dict_updates(states, BatchUpdate(4, [2], [], moved), lambda *_: None)
    assert states == {0: "d", 4: "new"}


def test_functions_of_a_request(text_model: Path) -> None:
    with LLM(text_model, **SETTINGS, model_runner="v1") as llm:
        plain = tokens(llm, [greedy()] * 3)
        params = [greedy(logits_processors=[only(20)]), greedy(), greedy(logits_processors=[by_prompt])]
        assert tokens(llm, params) == [[20, 21, 22, 23], plain[1], [14, 15, 16, 17]]
        outputs = llm.generate(PROMPTS, [greedy(), greedy(logits_processors=[fails]), greedy()], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [plain[0], plain[1][:2], plain[2]]
        assert outputs[1].outputs[0].finish_reason == "error"


@pytest.mark.parametrize("kind", [Target, AddedFirst, Updated, Adapted, f"{__name__}:Target"], ids=str)
def test_classes_select_v1_and_change_their_requests(kind: Any, text_model: Path) -> None:
    with LLM(text_model, **SETTINGS, max_num_seqs=2, logits_processors=[kind]) as llm:
        assert llm.llm_engine.runner_name == "v1"
        assert "custom logits processors" in llm.llm_engine.plan.reasons[0]
        plain = tokens(llm, [greedy()] * 3)
        params = [greedy(extra_args={"target": 30}), greedy(), greedy(extra_args={"target": 40})]
        step = int(kind is Adapted)
        expected = [[first + step * index for index in range(4)] for first in (30, 40)]
        assert tokens(llm, params) == [expected[0], plain[1], expected[1]]
        assert tokens(llm, params[::-1]) == [expected[1], plain[1], expected[0]]
        if kind is Target:
            with pytest.raises(ValueError, match="target must be an int"):
                llm.generate(PROMPTS[0], greedy(extra_args={"target": "x"}), use_tqdm=False)


def test_processors_that_greedy_requests_ignore(text_model: Path) -> None:
    with LLM(text_model, **SETTINGS, logits_processors=[Sharp]) as llm:
        plain = tokens(llm, [greedy()] * 3)
        assert not Sharp.largest
        drawn = SamplingParams(temperature=0.5, max_tokens=4, ignore_eos=True, top_p=0.9)
        assert tokens(llm, [drawn, greedy(), drawn]) == plain
        assert len(Sharp.largest) >= 4


@pytest.mark.parametrize(
    ("kind", "places"), [(Faulty, ["update_state", "apply"]), (FaultyAdapter, ["update_state", "apply", "shape"])]
)
def test_a_class_that_raises_for_a_request_ends_it_alone(kind: Any, places: list[str], text_model: Path) -> None:
    with LLM(text_model, **SETTINGS, logits_processors=[kind, Sharp]) as llm:
        plain = tokens(llm, [greedy()] * 3)
        step = int(kind is FaultyAdapter)
        for place in places:
            params = [greedy(extra_args={"target": 30}), greedy(extra_args={"fails": place, "target": 9}), greedy()]
            first, second, third = (output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False))
            assert [first.token_ids, third.token_ids] == [[30 + step * index for index in range(4)], plain[2]]
            assert (second.token_ids, second.finish_reason) == ([], "error")
            assert f"the logits processor {kind.__name__} raised" in str(second.stop_reason)
        assert tokens(llm, [greedy()] * 3) == plain


def test_a_class_that_raises_for_the_batch_ends_it(text_model: Path) -> None:
    with LLM(text_model, **SETTINGS, logits_processors=[FaultyInBatch]) as llm:
        params = [greedy(extra_args={"target": 30 + index}) for index in range(3)]
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert [output.stop_reason for output in outputs] == [
            "the logits processor FaultyInBatch raised RuntimeError: two"
        ] * 3
        assert tokens(llm, params[:1] + [greedy()] * 2)[0] == [30] * 4


def test_preempted_chunked_and_copied_requests_keep_their_processors(text_model: Path) -> None:
    few = SETTINGS | {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 4, "max_num_seqs": 3}
    with LLM(text_model, **few, max_model_len=32, logits_processors=[Target]) as llm:
        params = [
            greedy(max_tokens=18, extra_args={"target": target}, logprobs=0, n=n, temperature=0.5)
            for target, n in ((30, 1), (40, 2), (50, 1))
        ]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats().scheduler.num_preemptions > 0
        assert [{*request.outputs[-1].token_ids} for request in outputs] == [{30}, {40}, {50}]
        for output in (output for request in outputs for output in request.outputs):
            assert len(output.token_ids) == len(output.logprobs or ()) == 18


def test_entry_points_run_first(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("target", f"{__name__}:Target", plan_processors.GROUP)
    monkeypatch.setattr(plan_processors, "entry_points", lambda *, group: [found] if group == found.group else [])
    listed = plan_processors.listed_processors(EngineConfig(model=str(text_model), logits_processors=(Sharp,)))
    assert [kind.__name__ for kind in plan_processors.load_processors(listed)] == ["Target", "Sharp"]


@pytest.mark.parametrize("name", ["function", "class"])
def test_the_examples_of_the_documentation(name: str, text_model: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "logits_processors.md").read_text(encoding="utf-8")
    (example,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {"LLM": LLM, "SamplingParams": SamplingParams, "model": text_model}
    exec(example, scope)
    with scope["llm"]:
        first = scope["outputs"][0].outputs[0].token_ids
        assert set(first) == {42} if name == "class" else len(set(first)) == 16


def test_what_is_refused(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(text_model, **SETTINGS, model_runner="v2") as llm:
        with pytest.raises(ValueError, match=r"logits_processors is .* start the engine with model_runner='v1'"):
            llm.generate(PROMPTS[0], greedy(logits_processors=[fails]), use_tqdm=False)
        with pytest.raises(ValueError, match="extra_args can hold kv_transfer_params, got 'target'"):
            llm.generate(PROMPTS[0], greedy(extra_args={"target": 1}), use_tqdm=False)
    with pytest.raises(ValueError, match="logits_processors must be a list of functions"):
        greedy(logits_processors="x")
    for kind, message in ((dict, "it must be a class derived from"), ("no.such:Class", "cannot be imported")):
        with pytest.raises(ValueError, match=f"logits_processors has .*{message}"):
            LLM(text_model, **SETTINGS, logits_processors=[kind])
    with pytest.raises(ValueError, match="logits processor LogitsProcessor raised TypeError: Can't instantiate"):
        LLM(text_model, **SETTINGS, logits_processors=[LogitsProcessor])
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="logits_processors is set, and so is speculative_config"):
        LLM(text_model, **SETTINGS, logits_processors=[Target], speculative_config=drafts)

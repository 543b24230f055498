"""What the requests of a soak must give: a bounded pool of cases, several sets of weights, and engines that run one
sequence at a time, plainly, and know the output of each case with each set."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fleetfoot import LLMEngine, RequestOutput, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.outputs import CompletionOutput, Logprob

TOLERANCE = 1e-3
"""Of a logprob in float32, whatever it was batched with: states of random weights have had 3e-4."""
TIE = 1e-3
"""Two tokens whose logits differ by less may be exchanged."""
MAX_MODEL_LEN = 96

Tensors = dict[str, torch.Tensor]
Entry = dict[int, Logprob] | None


class WeightSets:
    """A checkpoint, and copies of it with other values in a share of all tensors' elements; numbered from 0."""

    def __init__(self, model: Path, folder: Path, count: int) -> None:
        self.folders = [model, *(folder / f"weights-{number}" for number in range(1, count))]
        first = load_file(model / "model.safetensors")
        self._tensors: list[Tensors] = [first]
        for number in range(1, count):
            generator = torch.Generator().manual_seed(number)
            tensors = dict(first)
            # those of a layer for second tokens stay: an engine without drafts does not have them
            for name in [name for name in sorted(first) if not name.startswith("mtp.")][number::3]:
                tensor = first[name].flatten().clone()
                chosen = torch.randperm(len(tensor), generator=generator)[: max(1, len(tensor) // 20)]
                scale = tensor.float().std(correction=0) + 0.1
                tensor[chosen] = (torch.randn(len(chosen), generator=generator) * scale).to(tensor.dtype)
                tensors[name] = tensor.view_as(first[name])
            shutil.copytree(model, self.folders[number])
            save_file(tensors, self.folders[number] / "model.safetensors", metadata={"format": "pt"})
            self._tensors.append(tensors)

    def changed(self, old: int, new: int) -> Tensors:
        """The whole tensors that lead from one set to another."""
        before, after = self._tensors[old], self._tensors[new]
        return {name: tensor for name, tensor in after.items() if not torch.equal(tensor, before[name])}

    def patches(self, old: int, new: int) -> list[dict[str, Any]]:
        """The same as sparse patches."""
        patches = []
        for name, tensor in self.changed(old, new).items():
            values = tensor.flatten()
            indices = (values != self._tensors[old][name].flatten()).nonzero().flatten()
            patches.append({"name": name, "indices": indices, "values": values[indices], "shape": list(tensor.shape)})
        return patches


@dataclasses.dataclass(frozen=True)
class Case:
    """A request of the pool. All of its noise is seeded."""

    prompt: list[int]
    fields: dict[str, Any]
    """Of `SamplingParams`."""

    def params(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{**self.fields, **changes})


_GRAMMARS: list[dict[str, Any]] = [
    {"choice": ["yes", "no, never", "perhaps not"]},
    {"regex": "[a-c]{2,6}( the)?"},
    {"grammar": 'start: ("a" | "bb")+ "."'},
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
]


def make_cases(count: int, seed: int, vocabulary: range = range(6, 2000)) -> list[Case]:
    """Prompts that share beginnings, and parameters of all kinds; greedy and sampled."""
    rng = random.Random(seed)
    beginning = [rng.choice(vocabulary) for _ in range(40)]
    cases = []
    for _ in range(count):
        prompt = beginning[: rng.choice([0, 5, 16, 24, 40])] + [
            rng.choice(vocabulary) for _ in range(rng.randint(1, 9))
        ]
        temperature = rng.choice([0.0, 0.0, 0.8, 1.2])
        fields: dict[str, Any] = {
            "temperature": temperature,
            "seed": rng.randrange(2**31),
            "max_tokens": rng.choice([1, 1, 2, 3, 4, 8]),
            "ignore_eos": rng.random() < 0.5,
        }
        if temperature:
            fields |= {"n": rng.choice([1, 1, 1, 2]), "top_k": rng.choice([0, 0, 20]), "top_p": rng.choice([1.0, 0.9])}
        kind = rng.randrange(8)
        if kind < 2:
            fields |= {"structured_outputs": rng.choice(_GRAMMARS), "max_tokens": 8}
        elif kind == 2:
            fields |= {"stop": [" the", "e", " a"], "include_stop_str_in_output": rng.random() < 0.5}
        elif kind == 3:
            fields |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 1}
        if rng.random() < 0.3:
            fields["logprobs"] = rng.choice([0, 1, 4])
        if rng.random() < 0.15:
            fields["prompt_logprobs"] = rng.choice([0, 2])
        cases.append(Case(prompt, fields))
    return cases


class Oracle:
    """The output of each case with each set of weights, computed before the soak begins; and, on demand, of a sequence
    whose weights changed after some tokens."""

    def __init__(self, weights: WeightSets, cases: Sequence[Case], **settings: Any) -> None:
        self.weights, self.cases = weights, cases
        self.num_replays = self.num_ties = 0
        plain: dict[str, Any] = {
            "device": "cpu", "dtype": "float32", "model_runner": "v1", "async_scheduling": False, "max_num_seqs": 1,
            "enable_prefix_caching": False, "max_model_len": MAX_MODEL_LEN, "block_size": 8,
            "num_gpu_blocks_override": MAX_MODEL_LEN // 8,
        }  # fmt: skip
        settings = {**plain, **settings}
        self._engines = [
            LLMEngine.from_config(EngineConfig(model=str(folder), **settings)) for folder in weights.folders
        ]
        self._replayer = LLMEngine.from_config(EngineConfig(model=str(weights.folders[0]), **settings))
        self._current = 0
        tokenizer: Any = self._replayer.tokenizer
        self._decode = tokenizer.decode
        self._outputs = [[_run(engine, case.prompt, case.params()) for case in cases] for engine in self._engines]

    def output(self, case: int, number: int) -> RequestOutput:
        """With the weights of one set."""
        return self._outputs[number][case]

    @property
    def num_distinct(self) -> int:
        """Cases whose tokens are different with each set, so that they show which one was served."""
        alike = [
            [tuple(map(_tokens, outputs[case].outputs)) for outputs in self._outputs] for case in range(len(self.cases))
        ]
        return sum(len(set(tokens)) == len(self._outputs) for tokens in alike)

    def replay(self, case: int, index: int, numbers: Sequence[int], **changes: Any) -> CompletionOutput:
        """Sequence ``index``, with the set of weights of each of its tokens. A change computes all KV again."""
        engine, self.num_replays = self._replayer, self.num_replays + 1
        self._change_to(numbers[0])
        count = 0

        def follow(output: RequestOutput) -> None:
            nonlocal count
            count = next((len(one.token_ids) for one in output.outputs if one.index == index), count)
            self._change_to(numbers[min(count, len(numbers) - 1)])

        output = _run(engine, self.cases[case].prompt, self.cases[case].params(**changes), follow)
        return output.outputs[index]

    def _change_to(self, number: int) -> None:
        if number != self._current:
            patches = self.weights.patches(self._current, number)
            self._replayer.apply_sparse_weight_patches(patches, mode="wait")
            self._current = number

    def problem(
        self, case: int, seen: CompletionOutput, numbers: Sequence[int], *, is_part: bool = False
    ) -> str | None:
        """How a sequence differs from that of ``numbers``, the set of weights of each token; None: it does not.

        Args:
            is_part: only its tokens count, because it was aborted.
        """
        numbers = list(numbers) or [0]
        if len(set(numbers)) == 1:
            expected = self.output(case, numbers[0]).outputs[seen.index]
        else:
            expected = self.replay(case, seen.index, numbers)
        problem = difference(seen, expected, is_part=is_part)
        if is_part and not self._decode(seen.token_ids, skip_special_tokens=True).startswith(
            seen.text.rstrip("\ufffd")
        ):
            problem = f"text is {seen.text!r} of the tokens {seen.token_ids}"
        first = next((i for i, pair in enumerate(zip(seen.token_ids, expected.token_ids)) if pair[0] != pair[1]), None)  # noqa: B905
        if problem is None or first is None:
            return problem
        bias = {**self.cases[case].fields.get("logit_bias", {}), seen.token_ids[first]: TIE}
        nudged = self.replay(case, seen.index, numbers, logit_bias=bias)
        if difference(seen, nudged, is_part=is_part) is None:
            self.num_ties += 1
            return None
        return problem

    def shutdown(self) -> None:
        for engine in (*self._engines, self._replayer):
            engine.shutdown()


def _tokens(completion: CompletionOutput) -> tuple[int, ...]:
    return tuple(completion.token_ids)


def _run(
    engine: LLMEngine, prompt: list[int], params: SamplingParams, follow: Callable[[RequestOutput], None] | None = None
) -> RequestOutput:
    """The output of a request that runs alone; ``follow`` is called with each part of it."""
    engine.add_request("oracle", prompt, params)
    while True:
        for output in engine.step():
            if output.finished:
                return output
            if follow is not None:
                follow(output)


def difference(seen: CompletionOutput, expected: CompletionOutput, *, is_part: bool = False) -> str | None:
    """The first field that differs, with both values; None: there is none. ``is_part``: see `Oracle.problem`."""
    count = len(seen.token_ids) if is_part else None
    fields: list[tuple[str, Any, Any]] = [("token_ids", seen.token_ids, expected.token_ids[:count])]
    if not is_part:
        names = ("text", "finish_reason", "stop_reason")
        fields += [(name, getattr(seen, name), getattr(expected, name)) for name in names]
    for name, mine, other in fields:
        if mine != other:
            return f"{name} is {mine!r} instead of {other!r}"
    sums = seen.cumulative_logprob, expected.cumulative_logprob
    distance = 0.0 if is_part or sums[0] is None or sums[1] is None else abs(sums[0] - sums[1])
    if distance > TOLERANCE * max(1, len(seen.token_ids)):
        return f"cumulative_logprob is {sums[0]} instead of {sums[1]}"
    return entries_difference("logprobs", seen.logprobs, expected.logprobs and expected.logprobs[:count])


def entries_difference(name: str, seen: Sequence[Entry] | None, expected: Sequence[Entry] | None) -> str | None:
    """The same for logprobs, or prompt logprobs."""
    if seen is None or expected is None or len(seen) != len(expected):
        return None if seen == expected else f"{name} is {seen!r} instead of {expected!r}"
    for place, (mine, other) in enumerate(zip(seen, expected, strict=True)):
        if not entry_fits(mine, other):
            return f"{name}[{place}] is {mine!r} instead of {other!r}"
    return None


def entry_fits(seen: Entry, expected: Entry) -> bool:
    """Whether the logprobs of a position are equal up to rounding; at the end, tokens that tie may be exchanged."""
    if not seen or not expected or len(seen) != len(expected):
        return seen == expected
    for token, one in seen.items():
        if (other := expected.get(token)) is None:
            if abs(one.logprob - min(entry.logprob for entry in expected.values())) > TOLERANCE:
                return False
        elif abs(one.logprob - other.logprob) > TOLERANCE or (
            one.rank is not None and (abs(one.rank - other.rank) > 2 or one.decoded_token != other.decoded_token)
        ):
            return False
    return True


def ties_allowed(num_tokens: int) -> int:
    """Of sampled tokens, how many may be exchanged for one that ties."""
    return 3 + num_tokens // 10_000

"""Beam search by requests of one token each. Names and fields follow vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fleetfoot.outputs import Logprob
from fleetfoot.records.sampling_params import BeamSearchParams


@dataclass(slots=True)
class BeamSearchSequence:
    """A sequence, with the tokens of its prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """The candidates of each generated token."""
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of a prompt, the best one first."""

    sequences: list[BeamSearchSequence]


def search(
    step: Callable[[list[tuple[int, list[int]]]], Sequence[dict[int, Logprob]]],
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos_token_ids: Collection[int],
) -> list[BeamSearchOutput]:
    """Search from each prompt. ``step`` gets the index of the prompt and the tokens of every sequence, and returns the
    candidates for its next token."""

    def best(beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        lengths = {id(beam): len(beam.tokens) - (beam.stop_reason is not None) for beam in beams}
        score = lambda beam: beam.cum_logprob / lengths[id(beam)] ** params.length_penalty  # noqa: E731
        return sorted(beams, key=score, reverse=True)[: params.beam_width]

    end_tokens = () if params.ignore_eos else eos_token_ids
    live = [(index, BeamSearchSequence(tokens)) for index, tokens in enumerate(prompts)]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        grown: list[list[BeamSearchSequence]] = [[] for _ in prompts]
        candidates = step([(index, beam.tokens) for index, beam in live])
        for (index, beam), entries in zip(live, candidates, strict=True):
            for token, entry in entries.items():
                new = BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, entries])
                new.cum_logprob = beam.cum_logprob + entry.logprob
                if token in end_tokens:
                    new.finish_reason, new.stop_reason = "stop", token
                (ended if token in end_tokens else grown)[index].append(new)
        live = [(index, beam) for index, beams in enumerate(grown) for beam in best(beams)]
    for index, beam in live:
        beam.finish_reason = "length"
        ended[index].append(beam)
    return [BeamSearchOutput(best(beams)) for beams in ended]

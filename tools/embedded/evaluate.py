"""How good an embedded model is: held-out loss, sample stories, and how many of them pass the story checker.

Usage: `python tools/embedded/evaluate.py FOLDER [--device cpu] [--samples 200]`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from data import TokenData, make_data
from stories import check_story, generate_story
from story_chat import Message, render, story_request
from story_grammar import Chooser
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

PROMPT_WORDS = 8
MAX_NEW_TOKENS = 320
CHAT_QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "Tell me a story about a fox who lost a key.",
)


@dataclass(frozen=True)
class Continuations:
    """Texts that a model wrote, and what the checker found in each."""

    texts: list[str]
    violations: list[list[str]]

    @property
    def good_share(self) -> float:
        """The share of texts without a violation."""
        return sum(not found for found in self.violations) / len(self.violations)


@dataclass(frozen=True)
class Report:
    """What `evaluate` measures; losses in nats per token."""

    held_out_loss: float
    entropy_bound: float
    late_position_loss: float
    greedy_good_share: float
    sampled_good_share: float
    chat_good_share: float


@torch.inference_mode()
def held_out_loss(model: Any, data: TokenData, length: int, rows: int, first_position: int = 0) -> float:
    """Mean loss in nats per token over windows of `length` tokens that start with a document.

    Args:
        model: a causal language model of `transformers`.
        data: held-out documents.
        length: window length in tokens.
        rows: how many windows.
        first_position: leave out the losses of earlier positions.
    """
    starts = data.starts[data.starts + length + 1 <= len(data.ids)]
    starts = starts[:: max(1, len(starts) // rows)][:rows]
    total = 0.0
    for start in starts:
        window = torch.from_numpy(data.ids[start : start + length + 1].astype("int64")).to(model.device)  # [length + 1]
        logits = model(window[None, :-1], use_cache=False).logits[0, first_position:].float()  # [length, vocab]
        total += torch.nn.functional.cross_entropy(logits, window[first_position + 1 :]).item()
    return total / len(starts)


@torch.inference_mode()
def generate(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[str], temperature: float, seed: int = 0
) -> list[tuple[str, bool]]:
    """Continue each prompt (with its special tokens written out): (new text, whether the model ended it)."""
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    width = max(map(len, encoded))
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    ids = torch.tensor(
        [[pad] * (width - len(row)) + row for row in encoded], device=model.device
    )  # [num_prompts, width]
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded], device=model.device)
    torch.manual_seed(seed)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, **how)[:, width:].tolist()
    results = []
    for row in output:
        ended = end in row
        results.append((tokenizer.decode(row[: row.index(end)] if ended else row), ended))
    return results


def continue_stories(model: Any, tokenizer: Tokenizer, count: int, temperature: float) -> Continuations:
    """Let the model continue the first words of held-out stories, and check the whole."""
    prompts = [" ".join(generate_story(f"prompt {index}").text.split(" ")[:PROMPT_WORDS]) for index in range(count)]
    begin = render([])
    results = generate(model, tokenizer, [begin + prompt for prompt in prompts], temperature)
    texts = [prompt + text for prompt, (text, _) in zip(prompts, results, strict=True)]
    violations = [check_story(text, allow_truncated=not ended) for text, (_, ended) in zip(texts, results, strict=True)]
    return Continuations(texts, violations)


def answer_requests(model: Any, tokenizer: Tokenizer, count: int, temperature: float) -> Continuations:
    """Let the model answer requests for stories, and check that the stories are good and about what was asked for."""
    requests = [story_request(Chooser(f"request {index}")) for index in range(count)]
    prompts = [render([Message("user", request.text)], add_generation_prompt=True) for request in requests]
    results = generate(model, tokenizer, prompts, temperature)
    violations = [
        check_story(text, allow_truncated=not ended, given=request.asked)
        for (text, ended), request in zip(results, requests, strict=True)
    ]
    return Continuations([text for text, _ in results], violations)


def show_samples(model: Any, tokenizer: Tokenizer, sampled: Continuations) -> None:
    """Print three stories, the first bad ones with what is wrong, and answers to a few chat questions."""
    for text in sampled.texts[:3]:
        print(f"--- sample\n{text}")
    bad = [(text, found) for text, found in zip(sampled.texts, sampled.violations, strict=True) if found]
    for _, found in bad[:5]:
        print(f"--- violation: {found[0]}")
    prompts = [render([Message("user", question)], add_generation_prompt=True) for question in CHAT_QUESTIONS]
    for question, (answer, _) in zip(CHAT_QUESTIONS, generate(model, tokenizer, prompts, 0.0), strict=True):
        print(f"--- user: {question}\n{answer}")


def evaluate(folder: Path, device: str, samples: int, held_out: TokenData | None = None, windows: int = 64) -> Report:
    """Measure the checkpoint in `folder`, print samples and the report.

    Args:
        folder: a checkpoint in Hugging Face's format, with its tokenizer.
        device: where to run it.
        samples: how many stories to sample at temperature 0.7.
        held_out: documents for the loss; made here if None.
        windows: how many windows of 512 tokens the loss is measured on.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    held_out = held_out or make_data(folder / "tokenizer.json", "held-out", 1000, workers=1)
    sampled = continue_stories(model, tokenizer, samples, temperature=0.7)
    fewer = max(1, samples // 4)
    report = Report(
        held_out_loss=held_out_loss(model, held_out, 512, windows),
        entropy_bound=held_out.nats_per_token,
        late_position_loss=held_out_loss(model, held_out, 2048, max(1, windows // 8), first_position=1024),
        greedy_good_share=continue_stories(model, tokenizer, fewer, temperature=0.0).good_share,
        sampled_good_share=sampled.good_share,
        chat_good_share=answer_requests(model, tokenizer, fewer, temperature=0.7).good_share,
    )
    show_samples(model, tokenizer, sampled)
    print(
        f"=== {folder.name}: {json.dumps({name: round(value, 4) for name, value in asdict(report).items()})}",
        flush=True,
    )
    return report


def main() -> None:
    """Evaluate one folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="checkpoint folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--samples", type=int, default=200, help="stories to sample")
    arguments = parser.parse_args()
    evaluate(arguments.folder, arguments.device, arguments.samples)


if __name__ == "__main__":
    main()

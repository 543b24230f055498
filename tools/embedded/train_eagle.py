"""Trains the EAGLE head of an embedded model, and measures how many of its drafts the model accepts.

`python tools/embedded/train_eagle.py --out src/fleetfoot/assets/story-llama-eagle` trains the head of `story-llama` on
one CPU core in twenty minutes. The target is frozen; its hidden states are made anew for every batch, so that nothing
is stored. The checkpoint is written at every evaluation. Of two runs on one machine that end by `--steps`, not by
`--max-seconds`, both write the same file.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import make_data
from eagle_head import EagleHead
from train import BETAS, MAX_GRADIENT_NORM, BatchSource, Settings, learning_rate
from transformers import AutoModelForCausalLM

from fleetfoot.kernels.sampling.gumbel import gumbel_noise

DEPTH_WEIGHT = 0.7  # of each draft's loss relative to that of the draft before: a late draft counts only if all hold
EVALUATIONS = 10
PROMPT_TOKENS = 12
WRITTEN_TOKENS = 200


@dataclass(frozen=True)
class Acceptance:
    """What drafting does for held-out prompts.

    Attributes:
        tokens_per_step: accepted drafts and the target's own token, on average.
        rate: accepted drafts / drafts.
    """

    tokens_per_step: float
    rate: float


class Target:
    """The frozen model."""

    def __init__(self, folder: Path, device: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.model.requires_grad_(False)

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """After the final norm, which is what EAGLE's features are. [rows, length] -> [rows, length, hidden_size]"""
        return self.model.model(ids, use_cache=False).last_hidden_state

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """[rows, length] -> [rows, length, hidden_size]"""
        return self.model.get_input_embeddings()(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., vocab]"""
        return self.model.lm_head(hidden)


def head_loss(head: EagleHead, target: Target, ids: torch.Tensor, depth: int, feature_weight: float) -> torch.Tensor:
    """Cross entropy with the target's distribution, and smooth L1 to its hidden states, over all drafts.

    Args:
        ids: [rows, length + 1]
    """
    hidden = target.hidden(ids)  # [rows, length + 1, hidden_size]
    wanted = hidden[:, 1:]
    distribution = target.logits(wanted).softmax(dim=-1)  # [rows, length, vocab]
    total, weight, weights = hidden.new_zeros(()), 1.0, 0.0
    for draft, foreseen in enumerate(head.unroll(target.embeddings(ids[:, 1:]), hidden[:, :-1], depth)):
        log_q = target.logits(foreseen[:, draft:]).log_softmax(dim=-1)
        cross_entropy = -(distribution[:, draft:] * log_q).sum(dim=-1).mean()
        features = F.smooth_l1_loss(foreseen[:, draft:], wanted[:, draft:])
        total = total + weight * (cross_entropy + feature_weight * features)
        weight, weights = weight * DEPTH_WEIGHT, weights + weight
    return total / weights


@torch.no_grad()
def write(target: Target, prompts: torch.Tensor, temperature: float, noise: torch.Tensor) -> torch.Tensor:
    """Continue prompts [rows, length] by WRITTEN_TOKENS; noise [rows, total, vocab] is for Gumbel-max."""
    ids, past, fed = prompts, None, prompts
    for _ in range(WRITTEN_TOKENS):
        output = target.model(fed, past_key_values=past, use_cache=True)
        past = output.past_key_values
        fed = choose(output.logits[:, -1], temperature, noise[:, ids.shape[1]])[:, None]
        ids = torch.cat((ids, fed), dim=1)
    return ids


def choose(logits: torch.Tensor, temperature: float, noise: torch.Tensor) -> torch.Tensor:
    """The argmax, or the draw that the noise stands for. [..., vocab] -> [...]"""
    return (logits / temperature + noise if temperature else logits).argmax(dim=-1)


@torch.no_grad()
def measure(head: EagleHead, target: Target, prompts: torch.Tensor, depth: int, temperature: float) -> Acceptance:
    """Let the target continue the prompts, and see how many steps it would have taken with drafts.

    Target and head draw with the same noise, of request and position, as the engine does. While all drafts so far
    are right, the head has been fed the tokens of the text itself; so one pass over the text tells of drafts from
    everywhere.

    Args:
        prompts: [rows, length]
        depth: drafts in a step.
    """
    rows, length = prompts.shape
    total = length + WRITTEN_TOKENS
    vocab = target.model.config.vocab_size
    seeds = torch.arange(rows, device=prompts.device).repeat_interleave(total)
    positions = torch.arange(total, device=prompts.device).repeat(rows)
    noise = gumbel_noise(seeds, positions, vocab).reshape(rows, total, vocab)
    ids = write(target, prompts, temperature, noise)
    outputs = head.unroll(target.embeddings(ids[:, 1:]), target.hidden(ids)[:, :-1], depth)
    right = []  # for each draft: whether the token that it proposes for position i + 2 is the text's
    for foreseen in outputs:
        drafted = choose(target.logits(foreseen[:, :-1]), temperature, noise[:, 2:])
        right.append((drafted == ids[:, 2:]).tolist())
    steps = accepted = 0
    end_token = target.model.config.eos_token_id
    for row in range(rows):
        text = ids[row].tolist()
        end = text.index(end_token) if end_token in text else total - 1
        newest = length  # the prompt's step has yielded one token
        while newest + depth <= end:
            num_right = 0  # draft s for position newest + 1 + s stands at entry newest - 1 + s
            while num_right < depth and right[num_right][row][newest - 1 + num_right]:
                num_right += 1
            newest += 1 + num_right
            accepted += num_right
            steps += 1
    return Acceptance(1 + accepted / steps, accepted / (steps * depth))


def train(
    head: EagleHead, target: Target, source: BatchSource, prompts: torch.Tensor, arguments: argparse.Namespace
) -> None:
    """Train in place, for a time; writes the head at every evaluation."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.0, betas=BETAS, weight_decay=0.01)
    began, step, evaluations, progress = time.monotonic(), 0, 0, 0.0
    losses: list[torch.Tensor] = []
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(arguments.learning_rate, progress)
        loss = head_loss(head, target, source.draw(0.0), arguments.depth, arguments.feature_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        step += 1
        seconds = time.monotonic() - began
        progress = max(step / arguments.steps, seconds / arguments.max_seconds)
        if progress >= min(1.0, (evaluations + 1) / EVALUATIONS):
            evaluations += 1
            head.save(arguments.out)
            row = {"step": step, "loss": torch.stack(losses).mean().item(), "seconds": seconds}
            row["tokens_per_step"] = measure(head, target, prompts[:8], 3, 0.0).tokens_per_step
            losses = []
            print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)


def report(head: EagleHead, target: Target, prompts: torch.Tensor) -> None:
    """Print what drafts are worth."""
    for depth in (1, 2, 3, 5):
        for temperature in (0.0, 1.0):
            found = measure(head, target, prompts, depth, temperature)
            print(
                f"k={depth} temperature={temperature:g}: {found.tokens_per_step:.2f} tokens a step, "
                f"{100 * found.rate:.0f}% of the drafts accepted",
                flush=True,
            )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for config.json and model.safetensors")
    parser.add_argument("--target", type=Path, default=Path("src/fleetfoot/assets/story-llama"), help="its checkpoint")
    parser.add_argument("--documents", type=int, default=12_000, help="training documents, about 200 tokens each")
    parser.add_argument("--workers", type=int, default=1, help="processes that make the documents")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--depth", type=int, default=3, help="drafts that the head is trained to make in a row")
    parser.add_argument("--feature-weight", type=float, default=0.5, help="of the hidden states' loss")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=1050.0, help="the schedule is shortened to take no longer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report-only", action="store_true", help="train nothing; measure the head that is in --out")
    return parser.parse_args()


def main() -> None:
    """Train the head that the command line names, and report."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = arguments.target / "tokenizer.json"
    held_out = make_data(tokenizer, "held-out", 40, 1)
    starts = [int(start) for start in held_out.starts if start + PROMPT_TOKENS < len(held_out.ids)]
    prompts = torch.tensor([held_out.ids[start : start + PROMPT_TOKENS].tolist() for start in starts])
    target = Target(arguments.target, arguments.device)
    head = EagleHead(target.model.config).to(arguments.device)
    if arguments.report_only:
        head.load(arguments.out)
        report(head, target, prompts.to(arguments.device))
        return
    data = make_data(tokenizer, "train", arguments.documents, arguments.workers)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    print(f"{num_parameters} parameters, {len(data.ids)} tokens", flush=True)
    settings = Settings(
        arguments.steps, arguments.batch_tokens, arguments.device, arguments.seed, arguments.max_seconds, 0, 0
    )
    prompts = prompts.to(arguments.device)
    train(head, target, BatchSource(data, settings), prompts, arguments)
    head.load(arguments.out)  # in bfloat16
    report(head, target, prompts)


if __name__ == "__main__":
    main()

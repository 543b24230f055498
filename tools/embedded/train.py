"""Trains the embedded models from scratch on generated stories.

`python tools/embedded/train.py --out DIR --models story-llama --device cpu --steps 20` trains one model;
`--all-parallel` trains each named model in a process of its own, all on the same device. Writes a checkpoint folder per
model, `logs/` with the loss curves and reports, and `embedded.tar.gz` with all of it.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint import check_size, new_model, pack, save_checkpoint, token_ids
from data import TokenData, make_data
from evaluate import evaluate, held_out_loss
from shapes import SHAPES, Shape
from tokenizer import save_tokenizer, train_tokenizer

# (share of the steps after which it begins, sequence length): long sequences are dear, and a few of them suffice.
SEQUENCE_LENGTHS = ((0.0, 512), (0.7, 1024), (0.9, 2048))
WARM_UP_SHARE = 0.03
FINAL_LEARNING_RATE_SHARE = 0.02
EVALUATIONS = 20
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        steps: optimizer steps.
        batch_tokens: tokens per step.
        device: "cuda" or "cpu".
        seed: for weights and batches.
        max_seconds: the schedule is shortened so that training takes no longer.
        samples: stories to sample for the report; 0 for no report.
        windows: held-out windows of 512 tokens for the loss.
    """

    steps: int
    batch_tokens: int
    device: str
    seed: int
    max_seconds: float
    samples: int
    windows: int


class BatchSource:
    """Batches of packed documents, cut out of a token array that lies on the device.

    Each sequence starts with a document and goes on with those that follow it, so position 0 always holds `<|begin|>`.
    Documents see those before them; what separates them is the begin token.
    """

    def __init__(self, data: TokenData, settings: Settings) -> None:
        longest = max(length for _, length in SEQUENCE_LENGTHS)
        usable = data.starts[data.starts + longest + 1 <= len(data.ids)]
        self._ids = torch.from_numpy(data.ids.astype("int32")).to(settings.device)  # [num_tokens]
        self._starts = torch.from_numpy(usable).to(settings.device)  # [num_usable_documents]
        self._generator = torch.Generator(settings.device).manual_seed(settings.seed)
        self._batch_tokens = settings.batch_tokens

    def draw(self, progress: float) -> torch.Tensor:
        """A batch for this share of the training. [rows, length + 1] int64"""
        length = next(length for begin, length in reversed(SEQUENCE_LENGTHS) if progress >= begin)
        rows = max(1, self._batch_tokens // length)
        picks = torch.randint(len(self._starts), (rows,), device=self._starts.device, generator=self._generator)
        offsets = torch.arange(length + 1, device=self._starts.device)
        return self._ids[self._starts[picks][:, None] + offsets].long()


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then a cosine down to a small share of the peak; `progress` runs from 0 to 1."""
    if progress < WARM_UP_SHARE:
        return peak * progress / WARM_UP_SHARE
    angle = math.pi * (progress - WARM_UP_SHARE) / (1.0 - WARM_UP_SHARE)
    return peak * (FINAL_LEARNING_RATE_SHARE + (1.0 - FINAL_LEARNING_RATE_SHARE) * 0.5 * (1.0 + math.cos(angle)))


def new_optimizer(model: Any, shape: Shape, device: str) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only, and none on the norms' vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=shape.learning_rate, betas=BETAS, fused=device == "cuda")


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """One step on `batch` [rows, length + 1]; the loss stays on the device."""
    on_gpu = batch.device.type == "cuda"
    with torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else contextlib.nullcontext():
        logits = model(batch[:, :-1], use_cache=False).logits  # [rows, length, vocab]
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train_model(
    name: str, model: Any, data: TokenData, held_out: TokenData, settings: Settings
) -> list[dict[str, float]]:
    """Train in place; returns the loss curve (train loss: mean since the row before)."""
    source = BatchSource(data, settings)
    optimizer = new_optimizer(model, SHAPES[name], settings.device)
    curve: list[dict[str, float]] = []
    losses: list[torch.Tensor] = []
    began, step, progress = time.monotonic(), 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SHAPES[name].learning_rate, progress)
        losses.append(train_step(model, optimizer, source.draw(progress)))
        step += 1
        seconds = time.monotonic() - began
        progress = max(step / settings.steps, seconds / settings.max_seconds)
        if progress >= min(1.0, (len(curve) + 1) / EVALUATIONS):
            # Losses stay on the device until here, so that no step waits for its own loss.
            row = {
                "step": step,
                "train_loss": torch.stack(losses).mean().item(),
                "held_out_loss": held_out_loss(model, held_out, 512, settings.windows),
                "seconds": round(seconds, 1),
            }
            curve.append(row)
            losses = []
            print(f"{name}: {json.dumps({key: round(value, 4) for key, value in row.items()})}", flush=True)
    return curve


def produce(name: str, work: Path, tokenizer_folder: Path, out: Path, settings: Settings) -> None:
    """Train, write and evaluate one model."""
    torch.manual_seed(settings.seed)
    data, held_out = (TokenData.load(work / f"{split}.npz") for split in ("train", "held-out"))
    special_ids = token_ids(tokenizer_folder)
    model = new_model(SHAPES[name], special_ids).to(settings.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters} parameters, {len(data.ids)} tokens, entropy {held_out.nats_per_token:.4f}", flush=True)
    curve = train_model(name, model, data, held_out, settings)
    save_checkpoint(model, special_ids, tokenizer_folder, out / name)
    size = check_size(SHAPES[name], out / name)
    log: dict[str, object] = {
        "model": name,
        "parameters": parameters,
        "bytes": size,
        "settings": asdict(settings),
        "curve": curve,
    }
    if settings.samples:
        log["report"] = asdict(evaluate(out / name, settings.device, settings.samples, held_out, settings.windows))
    (out / "logs").mkdir(exist_ok=True)
    (out / "logs" / f"{name}.loss.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


def produce_in_processes(names: list[str], work: Path, arguments: argparse.Namespace) -> None:
    """Run `produce` for each name in a process of its own, all at once.

    Raises:
        RuntimeError: a process failed; its output says why.
    """
    settings = ("steps", "batch_tokens", "device", "seed", "max_seconds", "samples", "windows")
    flags = [f"--{key.replace('_', '-')}={getattr(arguments, key)}" for key in settings]
    common = [
        sys.executable,
        __file__,
        f"--out={arguments.out}",
        f"--tokenizer={arguments.tokenizer}",
        f"--data={work}",
        *flags,
    ]
    children = {name: subprocess.Popen([*common, f"--models={name}"]) for name in names}
    failed = [name for name, child in children.items() if child.wait() != 0]
    if failed:
        raise RuntimeError(f"training failed for {', '.join(failed)}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, logs and embedded.tar.gz")
    parser.add_argument("--models", default=",".join(SHAPES), help="names, separated by commas (default: all)")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer to use; without it, one is trained")
    parser.add_argument(
        "--data", type=Path, help="folder with train.npz and held-out.npz to use; without it, they are made"
    )
    parser.add_argument("--documents", type=int, default=150_000, help="training documents, about 200 tokens each")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that make the documents")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=240.0, help="limit for the training of one model")
    parser.add_argument("--samples", type=int, default=200, help="stories to sample for the report; 0 for no report")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows of 512 tokens for the loss")
    parser.add_argument("--all-parallel", action="store_true", help="one process per model, all at once")
    arguments = parser.parse_args()
    unknown = set(arguments.models.split(",")) - SHAPES.keys()
    if unknown:
        parser.error(f"unknown models {sorted(unknown)}; there are {', '.join(SHAPES)}")
    return arguments


def main() -> None:
    """Train what the command line names."""
    arguments = parse_arguments()
    names = arguments.models.split(",")
    settings = Settings(
        arguments.steps,
        arguments.batch_tokens,
        arguments.device,
        arguments.seed,
        arguments.max_seconds,
        arguments.samples,
        arguments.windows,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.tokenizer is None:
        arguments.tokenizer = arguments.out / "tokenizer"
        save_tokenizer(train_tokenizer(), arguments.tokenizer)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.data or Path(temporary)
        if arguments.data is None:
            tokenizer_json = arguments.tokenizer / "tokenizer.json"
            make_data(tokenizer_json, "train", arguments.documents, arguments.workers).save(work / "train.npz")
            make_data(tokenizer_json, "held-out", 2000, arguments.workers).save(work / "held-out.npz")
        if arguments.all_parallel:
            produce_in_processes(names, work, arguments)
        else:
            for name in names:
                produce(name, work, arguments.tokenizer, arguments.out, settings)
    if arguments.data is None:
        print(f"packed: {pack(arguments.out, [*names, 'logs'])}")


if __name__ == "__main__":
    main()

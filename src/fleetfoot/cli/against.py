"""`fleetfoot verify --against`: how the distributions of a model's next tokens differ from those of another one."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import with_settings
from fleetfoot.cli.command import (
    UsageError,
    count,
    dump_object,
    read_prompts_file,
    started_engine,
    usage_errors,
)
from fleetfoot.cli.drawing import Chart, Curve, check_plot_file, draw
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from fleetfoot.engine.engine import LLMEngine

NUM_TEXTS, TEXT_TOKENS = 8, 64
"""Texts that the other model writes, where no prompts are given."""
_ROWS = 64
"""Positions whose logits are in float32 at once."""


class _Recorder:
    """Keeps the hidden states of a model in this process, and those of its layers."""

    def __init__(self, model: Any, *, by_layer: bool) -> None:
        self.model = model
        self.layers: list[list[torch.Tensor]] = []
        self.last: list[torch.Tensor] = []
        model.register_forward_hook(lambda module, inputs, output: self.last.append(output.detach().clone()))
        for layer in model.model.layers.children() if by_layer else ():
            kept: list[torch.Tensor] = []
            self.layers.append(kept)
            layer.register_forward_hook(_keeper(kept))

    def logprobs(self, begin: int, end: int) -> torch.Tensor:
        """``[positions, vocab_size]`` float32."""
        hidden = self.last[0][begin:end]
        logits = self.model.compute_logits(hidden)
        return logits.float().log_softmax(dim=-1).cpu()


def _keeper(kept: list[torch.Tensor]) -> Callable[..., None]:
    return lambda module, inputs, output: kept.append(output.detach().float().cpu())


def run_against(arguments: argparse.Namespace) -> int:
    """Compare, and print the report. Returns the exit code."""
    check_plot_file("--plot", arguments.plot)
    prompts = None if arguments.prompts_file is None else read_prompts_file(arguments.prompts_file)
    other = with_settings(arguments, model=arguments.against, quantization=None, revision=None, kv_cache_dtype="auto")
    texts, expected, expected_layers = _record(other, prompts, None, by_layer=arguments.by_layer)
    _, found, found_layers = _record(arguments, None, texts, by_layer=arguments.by_layer)
    report = compare_logprobs(expected, found) | {
        "against": arguments.against, "num_texts": len(texts), "layers": _layer_errors(expected_layers, found_layers),
    }  # fmt: skip
    if arguments.plot is not None:
        plot(report, arguments.plot)
    curve = report.pop("kl_by_share")
    print(dump_object({**report, "kl_by_share": curve}) if arguments.json else _text(report))
    return 0


def _record(
    arguments: argparse.Namespace, prompts: Sequence[Any] | None, texts: list[list[int]] | None, *, by_layer: bool
) -> tuple[list[list[int]], list[torch.Tensor], list[list[torch.Tensor]]]:
    """The texts, of prompts or written by the model; for each the logprobs ``[positions, vocab_size]``; and for each
    layer its outputs."""
    settings = {"enforce_eager": True, "enable_prefix_caching": False, "distributed_executor_backend": "uni"}
    needs_tokenizer = texts is None and any(isinstance(prompt, str) for prompt in prompts or ())
    plain = with_settings(arguments, **settings, skip_tokenizer_init=not needs_tokenizer)
    logprobs: list[torch.Tensor] = []
    layers: list[list[torch.Tensor]] = []
    with started_engine(plain, use_v2_model_runner=False) as (engine, _):
        if texts is None:
            texts = _write_texts(engine, prompts)
        recorders: list[_Recorder] = []
        engine.collective_rpc(lambda worker: recorders.append(_Recorder(worker.runner.model, by_layer=by_layer)))
        (recorder,) = recorders
        with progress_bar(sys.stderr.isatty(), total=len(texts), description="Reading texts") as advance:
            for number, tokens in enumerate(texts):
                recorder.last.clear()
                prompt, settings = {"prompt_token_ids": tokens}, {"temperature": 0.0, "prompt_logprobs": 0}
                _generate(engine, f"text {number}", prompt, max_tokens=1, **settings)
                hidden = recorder.last
                recorder.last[:] = [_joined(hidden, len(tokens))]
                logprobs += [recorder.logprobs(begin, begin + _ROWS) for begin in range(0, len(tokens), _ROWS)]
                advance(len(tokens))
        layers = recorder.layers
    recorders.clear()
    del engine, recorder
    gc.collect()
    return texts, logprobs, layers


def _joined(parts: list[torch.Tensor], count_of_rows: int) -> torch.Tensor:
    """The hidden states of a prompt, of one or several chunks."""
    import torch

    return torch.cat(parts)[:count_of_rows]


def _write_texts(engine: LLMEngine, prompts: Sequence[Any] | None) -> list[list[int]]:
    """Token ids of prompts with their continuations; without prompts texts from a first token on."""
    config = engine.plan.model
    first = config.bos_token_id if config.bos_token_id is not None else 0
    given = [{"prompt_token_ids": [first]}] * NUM_TEXTS if prompts is None else prompts
    most = min(TEXT_TOKENS, engine.max_request_len // 2)
    texts = []
    with progress_bar(sys.stderr.isatty(), total=len(given), description="Writing texts") as advance:
        for number, prompt in enumerate(given):
            settings = {"temperature": 1.0, "seed": number, "max_tokens": most, "ignore_eos": True}
            output = _generate(engine, f"prompt {number}", prompt, **settings)
            texts.append([*output.prompt_token_ids, *output.outputs[0].token_ids])
            advance(len(output.outputs[0].token_ids))
    return texts


def _generate(engine: LLMEngine, name: str, prompt: Any, **settings: Any) -> Any:
    params = SamplingParams(**settings, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    with usage_errors():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output
    raise AssertionError("a request ends with an output")


def compare_logprobs(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The divergence of Kullback and Leibler of each position, in nats, from logprobs ``[positions, vocab_size]`` in
    pieces; and how many of the most probable tokens agree. Raises UsageError: the vocabularies differ."""
    import torch

    divergences, agreeing = [], 0
    for before, after in zip(expected, found, strict=True):
        if before.shape != after.shape:
            sizes = f"{before.shape[1]:,} and {after.shape[1]:,}"
            raise UsageError(f"the models have vocabularies of {sizes} tokens; they must have the same tokens")
        divergences.append((before.exp() * (before - after)).nan_to_num(nan=0.0).sum(dim=-1))
        agreeing += int((before.argmax(dim=-1) == after.argmax(dim=-1)).sum())
    each = torch.cat(divergences).double().clamp(min=0.0)
    shares = [number / 100 for number in range(101)]
    curve = each.quantile(torch.tensor(shares, dtype=torch.float64)).tolist()
    return {
        "num_positions": len(each), "mean_kl": each.mean().item(), "median_kl": curve[50], "p99_kl": curve[99],
        "largest_kl": curve[100], "top1_agreement": agreeing / len(each), "kl_by_share": curve,
    }  # fmt: skip


def _layer_errors(expected: list[list[torch.Tensor]], found: list[list[torch.Tensor]]) -> list[float]:
    """Norm of the difference of each layer's outputs, relative to that of the outputs."""
    import torch

    errors = []
    for before, after in zip(expected, found, strict=True):
        first, second = torch.cat(before), torch.cat(after)
        errors.append(((first - second).norm() / first.norm()).item())
    return errors


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"against {report['against']}, {count(report['num_positions'], 'position')} of "
        f"{count(report['num_texts'], 'text')}:",
        f"mean KL {report['mean_kl']:.3g} nats, median {report['median_kl']:.3g}, 99% below {report['p99_kl']:.3g}, "
        f"largest {report['largest_kl']:.3g}",
        f"the most probable token is the same at {report['top1_agreement']:.1%} of the positions",
    ]
    lines += [f"layer {number}: its output differs by {error:.2%}" for number, error in enumerate(report["layers"])]
    return "\n".join(lines)


def plot(report: dict[str, Any], file: str) -> None:
    """Draw the divergence of a share of the positions; and below it each layer's error, where it is known."""
    title = (
        f"mean KL {report['mean_kl']:.3g}, top-1 agreement {report['top1_agreement']:.1%}, against {report['against']}"
    )
    curve = [(float(percent), value) for percent, value in enumerate(report["kl_by_share"])]
    charts = [Chart("KL in nats, below which a share of the positions is", "% of the positions", [Curve("", curve)])]
    if layers := report["layers"]:
        bars = [(number + 0.5, error) for number, error in enumerate(layers)]
        charts.append(Chart("difference of each layer's output", "layer", [Curve("", bars, "bars")]))
    draw(title, charts, file)

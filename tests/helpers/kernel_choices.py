"""The kernels that are chosen for public shapes of models, on a Hopper GPU that is not there.

``python -m tests.helpers.kernel_choices`` writes them to ``tests/assets/kernel_choices``. A difference there is another
kernel for a step, and needs a measurement.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from fleetfoot.cli.plan import make_report
from fleetfoot.cli.plan_text import graph_lines, kernel_lines
from fleetfoot.config.engine import EngineConfig
from fleetfoot.plan.machine import Machine

FOLDER = Path(__file__).parents[1] / "assets" / "kernel_choices"
H200 = Machine(
    64 << 30, "NVIDIA H200", 140 << 30, num_gpus=1, has_triton=True, is_hopper=True, num_sms=132, has_nvrtc=True
)


def _sizes(hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], vocab: int, **others: Any) -> Any:
    """``heads``: of queries, of K and V, and their size."""
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2], "vocab_size": vocab,
        "max_position_embeddings": 32768, "dtype": "bfloat16", **others,
    }  # fmt: skip


_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
_GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "sliding_window_pattern": 6}
MODELS = {
    "qwen3-0.6b": _sizes(1024, 3072, 28, (16, 8, 128), 151936, **_QWEN3),
    "qwen3-1.7b": _sizes(2048, 6144, 28, (16, 8, 128), 151936, **_QWEN3),
    "qwen3-4b": _sizes(2560, 9728, 36, (32, 8, 128), 151936, **_QWEN3),
    "llama-3.1-8b": _sizes(4096, 14336, 32, (32, 8, 128), 128256, **_LLAMA),
    "llama-3.2-1b": _sizes(2048, 8192, 16, (32, 8, 64), 128256, **_LLAMA | {"tie_word_embeddings": True}),
    "tinyllama-1.1b": _sizes(2048, 5632, 22, (32, 4, 64), 32000, **_LLAMA),
    "gemma-3-1b": _sizes(1152, 6912, 26, (4, 1, 256), 262144, **_GEMMA3),
}


def write_config(name: str, folder: str | Path, **changes: Any) -> str:
    """The ``config.json`` of a model in a folder."""
    (Path(folder) / "config.json").write_text(json.dumps(MODELS[name] | changes))
    return str(folder)


def choices(name: str) -> str:
    """The graphs of a model, to whose sizes steps are padded, and its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        report = make_report(EngineConfig(model=write_config(name, folder)), H200, with_kernels=True)
    graphs = [f"{title:<8}{text}" for title, text in graph_lines(report)]
    return "\n".join([f"{name} on {H200.gpu_name}", *graphs, *kernel_lines(report["kernel_table"]), ""])


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        (FOLDER / f"{name}.txt").write_text(choices(name))


if __name__ == "__main__":
    main()

"""Programs that make an engine of several processes at their top level: workers do not run them again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
print("begins")
from fleetfoot import LLM, SamplingParams
class Wishes(SamplingParams):
    pass
llm = LLM(tensor_parallel_size=2, max_model_len=64, num_gpu_blocks_override=16, skip_tokenizer_init=True)
(output,) = llm.generate([[0, 587, 349, 286]], Wishes(temperature=0, max_tokens=4), use_tqdm=False)
print(len(output.outputs[0].token_ids), type(llm.llm_engine.core.executor).__name__)
"""


@pytest.mark.parametrize("source", ["file", "standard input"])
def test_no_guard_is_wanted(source: str, tmp_path: Path) -> None:
    argument = "-"
    if source == "file":
        (tmp_path / "program.py").write_text(PROGRAM)
        argument = str(tmp_path / "program.py")
    result = subprocess.run(
        [sys.executable, argument], input=PROGRAM, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["begins", "4 MultiprocessExecutor"]

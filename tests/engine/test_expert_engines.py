"""Engines of models with experts: one bad request, sleep, updates of single experts, and what a plan says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.engines import prompt_of

from fleetfoot import LLM, SamplingParams

VOCAB = 101
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
PROMPTS: list[Any] = [{"prompt_token_ids": prompt_of(length, VOCAB - 1, seed=length)} for length in (30, 7)]
BAD = {"prompt_token_ids": [5, VOCAB - 1, 6]}
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"


def tokens(llm: LLM, prompts: list[Any] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_one_engine(runner: str, tmp_path: Path) -> None:
    model_type, fields = UNTRAINED["qwen3-moe"]
    make_checkpoint(tmp_path, model_type, vocab_size=VOCAB, **fields)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][VOCAB - 1] = torch.nan
    save_file(tensors, file)
    settings = {**SETTINGS, "model_runner": runner, "skip_tokenizer_init": True, "enable_sleep_mode": True}
    with LLM(tmp_path, **settings) as llm:
        expected = tokens(llm)

        # logits of the router that are not numbers end their own request alone
        bad, *others = llm.generate([BAD, *PROMPTS], GREEDY, use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert [output.outputs[0].token_ids for output in others] == expected

        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                llm.reload_weights()
            assert tokens(llm) == expected

        # one matrix of one expert, and back
        before = llm.weight_checksums()
        llm.reload_weights({EXPERT: -3 * tensors[EXPERT]})
        after = llm.weight_checksums()
        assert {name for name in before if before[name] != after[name]} == {EXPERT}
        llm.reload_weights({EXPERT: tensors[EXPERT]})
        assert tokens(llm) == expected

"""Live weights under graphs: out of the GPU memory of another process, and as sparse patches, against fresh starts."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_engine, prompt_of, run_requests
from tests.helpers.processes import HANG

from fleetfoot import SamplingParams
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.weights.checksums import tensor_checksum
from fleetfoot.weights.transfer import ipc_update_info

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]

FILE = "model.safetensors"
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = {str(length): prompt_of(length, 101, seed=length) for length in (3, 9, 30)}


def tokens(engine: LLMEngine) -> dict[str, list[int]]:
    outputs = run_requests(engine, {name: (prompt, PARAMS) for name, prompt in PROMPTS.items()})
    return {name: outputs[name].outputs[0].token_ids for name in PROMPTS}


def engine_of(folder: Path, runner: str) -> LLMEngine:
    limits: dict[str, Any] = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 64, "max_model_len": 64}
    return make_engine(
        folder, device="cuda", dtype="float32", model_runner=runner, skip_tokenizer_init=True, max_num_seqs=4, **limits
    )


def addresses(worker: Any) -> dict[str, int]:
    return {name: specs[0].destination().data_ptr() for name, specs in worker.runner.weights._specs.items()}


def hold_weights(folder: Path, pipe: Connection) -> None:
    """The trainer's process: its weights are on the GPU until it gets a message."""
    tensors = {name: tensor.cuda() for name, tensor in load_file(folder / FILE).items()}
    pipe.send(ipc_update_info(tensors.items()))
    pipe.recv()


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True)])
def test_updates_keep_graphs_and_addresses(kind: str, tied: bool, runner: str, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for seed, folder in enumerate(folders[:2]):
        make_checkpoint(folder, kind, seed=seed, tie_word_embeddings=tied, head_dim=16)
    patches, after = [], load_file(folders[1] / FILE)
    for name, tensor in after.items():
        indices = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(1))[: tensor.numel() // 9]
        values = torch.randn(len(indices)) * 0.2
        after[name] = tensor.flatten().index_copy(0, indices, values).view_as(tensor)
        patches.append({"name": name, "indices": indices.cuda(), "values": values.cuda()})
    make_checkpoint(folders[2], kind, seed=1, tie_word_embeddings=tied, head_dim=16)
    save_file(after, folders[2] / FILE, metadata={"format": "pt"})
    expected = []
    for folder in folders:
        fresh = engine_of(folder, runner)
        expected.append(tokens(fresh))
        fresh.shutdown()
    assert expected[0] != expected[1] != expected[2]

    engine = engine_of(folders[0], runner)
    assert tokens(engine) == expected[0]
    before = engine.collective_rpc(addresses)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    trainer = context.Process(target=hold_weights, args=(folders[1], theirs), daemon=True)
    trainer.start()
    assert pipe.poll(HANG)
    assert engine.update_weights(pipe.recv()) == 1
    pipe.send("done")
    trainer.join(HANG)
    assert tokens(engine) == expected[1]
    assert engine.apply_sparse_weight_patches(patches, check_finite=True) == 2
    assert tokens(engine) == expected[2]
    assert engine.weight_checksums() == {name: tensor_checksum(tensor) for name, tensor in after.items()}
    assert engine.reload_weights(folders[0], mode="keep") == 3
    assert tokens(engine) == expected[0]
    assert engine.collective_rpc(addresses) == before
    engine.shutdown()

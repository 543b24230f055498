"""The preparation kernels, compiled: the cases of the unit tests, graphs, and addresses past 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.prepare_cases import BATCHES, get_batch
from tests.helpers.prepare_runs import CASES, OPS, GuardedOutputs, assert_same, run, token_inputs

from fleetfoot.kernels.prepare.gather_block_tables import gather_block_tables
from fleetfoot.kernels.prepare.slot_mapping import slot_mapping
from fleetfoot.kernels.prepare.take_in_writes import take_in_writes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("op", "batch"), CASES)
def test_kernel_matches_twin(op: str, batch: str) -> None:
    assert_same(run(OPS[op].dispatch, op, batch, "cuda"), run(OPS[op].dispatch, op, batch))


@pytest.mark.parametrize("op", [op for op in OPS if op != "take_in_writes"])
def test_a_graph_replays_with_another_batch(op: str) -> None:
    """Captured with a full batch, replayed with a padded one: no count came from the host."""
    batch, tokens = get_batch("graph_full").to("cuda"), token_inputs("graph_full", "cuda")
    OPS[op].call(OPS[op].dispatch, batch, tokens, GuardedOutputs("cuda"))  # compiles
    graph, outputs = torch.cuda.CUDAGraph(), GuardedOutputs("cuda")
    with torch.cuda.graph(graph):
        OPS[op].call(OPS[op].dispatch, batch, tokens, outputs)

    for name, tensor in get_batch("graph_padded").tensors().items():
        batch.tensors()[name].copy_(tensor)
    for name, tensor in token_inputs("graph_padded", "cuda").items():
        tokens[name].copy_(tensor)
    graph.replay()
    outputs.check_guards()
    assert_same({name: view.cpu() for name, view in outputs.views.items()}, OPS[op].expected("graph_padded"))


def test_writes_are_taken_in_from_the_hosts_memory() -> None:
    """Again and again out of one buffer, which the host changes once the kernel that reads it has run."""
    staged = torch.zeros(1000, dtype=torch.int32, pin_memory=True)
    front = torch.zeros(100, dtype=torch.int32, device="cuda")
    target = torch.zeros(5000, dtype=torch.int32, device="cuda")
    expected = torch.zeros(5000, dtype=torch.int32)
    for step in range(20):
        where = torch.randperm(5000)[:450].int()
        staged[:100] = step * 1000 + torch.arange(100)
        staged[100::2], staged[101::2] = where, step + torch.arange(450)
        take_in_writes(staged, front, target, 400 + step)
        expected[where[: 400 + step].long()] = (step + torch.arange(400 + step)).int()
        assert torch.equal(front.cpu(), staged[:100])
        assert torch.equal(target.cpu(), expected)


def test_one_compilation_serves_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step meets a compiler because its batch has another size, or its tensors another alignment."""
    import triton

    same_constants = [name for name in BATCHES if get_batch(name).block_size == 16]
    # One for each query length: warmed up like the graphs.
    ops = [op for op in OPS if op not in ("prepare_decode", "accept_drafts")]
    for op in ops:
        run(OPS[op].dispatch, op, "one_decode", "cuda")
    compiled: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **event: compiled.append(event["repr"]))
    for op in ops:
        for name in same_constants:
            run(OPS[op].dispatch, op, name, "cuda")
    assert compiled == []


def test_block_tables_past_32_bits() -> None:
    row_stride, block_size = 2**30, 16
    elements = 2 * row_stride + 64
    if torch.cuda.mem_get_info()[0] < 5 * elements:
        pytest.skip(f"needs {5 * elements / 2**30:.0f} GiB of GPU memory")
    table = torch.empty(elements, dtype=torch.int32, device="cuda").as_strided((3, 64), (row_stride, 1))
    table[2] = torch.arange(100, 164, dtype=torch.int32, device="cuda")
    idx_mapping, seq_lens = torch.tensor([[2], [1024]], dtype=torch.int32, device="cuda")
    out = torch.zeros(1, 64, dtype=torch.int32, device="cuda")
    gather_block_tables(table, idx_mapping, seq_lens, block_size, out=out)
    assert out[0].tolist() == list(range(100, 164))

    positions, batch_index = torch.tensor([1023], device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    limits = torch.full((3,), 2000, dtype=torch.int32, device="cuda")
    slot_mapping(positions, batch_index, idx_mapping, limits, table, block_size, slots=slots)
    assert slots.tolist() == [163 * block_size + 15]

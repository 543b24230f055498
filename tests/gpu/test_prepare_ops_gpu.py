"""The preparation kernels, compiled: the cases of the unit tests, graphs, and addresses past 32 bits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers.kernels import reference_kernels, triton_kernels
from tests.helpers.prepare_cases import BATCHES, Request, get_batch, make_batch
from tests.helpers.prepare_runs import CASES, OPS, GuardedOutputs, assert_same, run

from fleetfoot.kernels.interface import Kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kernels", [triton_kernels, reference_kernels])
@pytest.mark.parametrize(("op", "batch"), CASES)
def test_kernel_matches_loops(op: str, batch: str, kernels: Callable[[], Kernels]) -> None:
    assert_same(run(kernels(), op, batch, "cuda"), OPS[op].expected(get_batch(batch)))


@pytest.mark.parametrize("kernels", [triton_kernels, reference_kernels])
@pytest.mark.parametrize("op", [op for op in OPS if op != "apply_staged_writes"])
def test_a_graph_replays_with_another_batch(op: str, kernels: Callable[[], Kernels]) -> None:
    """Captured with a full batch, replayed with a padded one: no count came from the host."""
    batch, implementation = get_batch("graph_full").to("cuda"), getattr(kernels(), op)
    OPS[op].call(implementation, batch, GuardedOutputs("cuda"))  # compiles
    graph, outputs = torch.cuda.CUDAGraph(), GuardedOutputs("cuda")
    with torch.cuda.graph(graph):
        OPS[op].call(implementation, batch, outputs)

    for name, tensor in get_batch("graph_padded").tensors().items():
        batch.tensors()[name].copy_(tensor)
    graph.replay()
    outputs.check_guards()
    assert_same({name: view.cpu() for name, view in outputs.views.items()}, OPS[op].expected(get_batch("graph_padded")))


def test_writes_are_taken_in_from_the_hosts_memory() -> None:
    """Repeatedly out of one buffer, which the host changes once the kernel that reads it has run."""
    staged = torch.zeros(1000, dtype=torch.int32, pin_memory=True)
    front = torch.zeros(100, dtype=torch.int32, device="cuda")
    target = torch.zeros(5000, dtype=torch.int32, device="cuda")
    expected = torch.zeros(5000, dtype=torch.int32)
    for step in range(20):
        where = torch.randperm(5000)[:450].int()
        staged[:100] = step * 1000 + torch.arange(100)
        staged[100::2], staged[101::2] = where, step + torch.arange(450)
        triton_kernels().apply_staged_writes(staged, front, target, 400 + step)
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
        run(triton_kernels(), op, "one_decode", "cuda")
    compiled: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **event: compiled.append(event["repr"]))
    for op in ops:
        for name in same_constants:
            run(triton_kernels(), op, name, "cuda")
    assert compiled == []


def test_block_tables_past_32_bits() -> None:
    row_stride, block_size = 2**30, 16
    elements = 2 * row_stride + 64
    if torch.cuda.mem_get_info()[0] < 5 * elements:
        pytest.skip(f"needs {5 * elements / 2**30:.0f} GiB of GPU memory")
    table = torch.empty(elements, dtype=torch.int32, device="cuda").as_strided((3, 64), (row_stride, 1))
    table[2] = torch.arange(100, 164, dtype=torch.int32, device="cuda")
    batch = make_batch([Request(2, 1023, 1, 1023)], num_rows=3, max_blocks=64).to("cuda")
    batch = replace(batch, block_table=table, token_pages=torch.zeros(164 * block_size, dtype=torch.int32).cuda())
    batch = replace(batch, table_width=64)
    for prepare in (triton_kernels().prepare_inputs, triton_kernels().prepare_decode):
        outputs = GuardedOutputs("cuda")
        OPS["prepare_inputs"].call(prepare, batch, outputs)
        assert outputs.views["block_tables"][0].tolist() == list(range(100, 164))
        assert outputs.views["slots"].tolist() == [163 * block_size + 15]

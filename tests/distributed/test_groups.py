"""Groups that communicate: sums, gathers, pipelines and sampled tokens over gloo; the custom all-reduce."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_world, shared_memory
from tests.helpers.interpreter import HAS_TRITON, compiled, run_python  # also the ranks' interpreter

from fleetfoot.config.engine import EngineConfig
from fleetfoot.distributed import (
    ALL_REDUCE_ROWS,
    GATHER_SETS,
    GATHER_WORDS,
    all_reduce_words,
    peer_memory,
    peer_memory_words,
)
from fleetfoot.distributed.groups import (
    SINGLE_PIPELINE_GROUP,
    SINGLE_RANK,
    SINGLE_TENSOR_GROUP,
    CudaTensorGroup,
    StepShape,
    make_groups,
)
from fleetfoot.kernels.elementwise import add_rms_norm_torch
from fleetfoot.kernels.linear.rank_sums import RANK_SUM_ROWS
from fleetfoot.kernels.linear.tilings import MOST_REGISTERS
from fleetfoot.kernels.runtime.dry_tensors import dry_torch
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.records.forward_context import IntermediateTensors

CPU = torch.device("cpu")
SHAPE = StepShape(max_num_tokens=16, hidden_size=8, dtype=torch.bfloat16, device=CPU)
DTYPES = (torch.float32, torch.bfloat16)


def part_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The input of a rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def test_single_groups_communicate_nothing() -> None:
    x = torch.ones(2, 3)
    assert {name: (group.rank, group.size) for name, group in SINGLE_RANK.items()} == dict.fromkeys(
        EngineConfig().group_sizes, (0, 1)
    )
    assert all(group.is_first_rank and group.is_last_rank for group in SINGLE_RANK.values())
    assert SINGLE_TENSOR_GROUP.all_reduce(x) is x
    assert SINGLE_TENSOR_GROUP.all_gather(x, 3) is x
    assert SINGLE_TENSOR_GROUP.reducing(add_rms_norm_torch) is add_rms_norm_torch
    assert SINGLE_PIPELINE_GROUP.receive(3) is None
    SINGLE_PIPELINE_GROUP.send_sampled_tokens(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="no next rank to send to"):
        SINGLE_PIPELINE_GROUP.send(IntermediateTensors(x))
    with pytest.raises(RuntimeError, match="sends no packets"):
        SINGLE_PIPELINE_GROUP.receive_sampled_tokens(torch.zeros(1, dtype=torch.int32))


def work_of_four(rank: int) -> dict[str, Any]:
    """In one world: it takes seconds to make one."""
    found: dict[str, Any] = {}
    whole = make_groups({"tensor": 4}, SHAPE).tensor
    found["places"] = [(whole.rank, whole.size)]
    for dtype in DTYPES:
        found[f"sum {dtype}"] = whole.all_reduce(part_of(rank, 5, 8, dtype=dtype))
        found[f"gathered {dtype}"] = whole.all_gather(part_of(rank, 3, 6, dtype=dtype))
    found["nothing"] = (whole.all_reduce(torch.empty(0, 8)), whole.all_gather(torch.empty(0, 6), 20))
    found["cut"] = [whole.all_gather(part_of(rank, rows, 6), 17) for rows in (1, 3)]
    assert whole.reducing(add_rms_norm_torch) is add_rms_norm_torch  # exact: everything was gathered before
    whole.bitwise_reproducible = False
    norm = whole.reducing(add_rms_norm_torch)
    parts = part_of(rank, 3, 2, 8)  # three partial sums of a linear layer
    found["norm"] = norm(parts, part_of(9, 2, 8, dtype=torch.bfloat16), part_of(8, 8, dtype=torch.bfloat16), 1e-5)

    both = make_groups({"tensor": 2, "pipeline": 2}, SHAPE)
    found["places"] += [(both.tensor.rank, both.tensor.size), (both.pipeline.rank, both.pipeline.size)]
    found["sum of two"] = both.tensor.all_reduce(part_of(rank, 5, 8))

    found["waits"] = waits_of(rank)

    pipeline = make_groups({"pipeline": 4}, SHAPE).pipeline
    found["places"] += [(pipeline.rank, pipeline.size)]
    found["steps"], found["addresses"] = run_pipeline(pipeline)
    found["packets"] = run_packets(pipeline)
    found["errors"] = errors_of(pipeline)
    return found


class Connecting(Future[None]):
    """Connections that are made when an operation waits for them."""

    num_waits = 0

    def result(self, timeout: float | None = None) -> None:
        self.num_waits += 1
        if not self.done():
            self.set_result(None)
        return super().result(timeout)


def waits_of(rank: int) -> list[Any]:
    """What waits for connections that are still being made."""
    found: list[Any] = []
    for operation in ("all_reduce", "all_gather"):
        connecting = Connecting()
        group = CudaTensorGroup(dist.group.WORLD, None, None, connecting)  # type: ignore[arg-type]
        with dry_torch():
            getattr(group, operation)(torch.zeros(2, 8))
        found.append(connecting.num_waits)
        getattr(group, operation)(part_of(rank, 2, 8))
        group.connect()
        getattr(group, operation)(part_of(rank, 2, 8))
        found.append(connecting.num_waits)
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("no network"))
    for wait in (lambda group: group.all_reduce(torch.zeros(1, 8)), lambda group: group.connect()):
        try:
            wait(CudaTensorGroup(dist.group.WORLD, None, None, failed))  # type: ignore[arg-type]
        except RuntimeError as error:
            found.append(str(error))
    return found


NUM_TOKENS = (3, 1, 16, 2, 3)
"""Of the steps that go through a pipeline."""


def first_input(step: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact."""
    return part_of(step, NUM_TOKENS[step], 8).mul(8).round().bfloat16()


def run_pipeline(pipeline: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Each rank adds its number to each step and sends it on. A sender overwrites at once what it has sent, and the
    first is steps ahead of the last."""
    steps, addresses = [], []
    for step, num_tokens in enumerate(NUM_TOKENS):
        received = pipeline.receive(num_tokens)
        if received is None:
            received = IntermediateTensors(first_input(step))
        else:
            for tensors in (received, pipeline.buffers(num_tokens)):
                assert tensors.hidden_states.shape == (num_tokens, 8)
                addresses.append(tensors.hidden_states.data_ptr())
        steps.append(received.hidden_states.clone())
        if not pipeline.is_last_rank:
            leaving = IntermediateTensors(received.hidden_states + pipeline.rank + 1)
            pipeline.send(leaving)
            leaving.hidden_states.fill_(float("nan"))
    dist.barrier()  # no rank leaves with a step on its way
    return steps, addresses


def run_packets(pipeline: Any) -> list[torch.Tensor]:
    """Some steps sample nothing. The last rank overwrites at once what it has sent."""
    packets = [torch.full((step % 3, 2), step if pipeline.is_last_rank else -2).int() for step in range(5)]
    for packet in packets:
        if pipeline.is_last_rank:
            pipeline.send_sampled_tokens(packet)
            packet.fill_(-1)
        else:
            pipeline.receive_sampled_tokens(packet)
    dist.barrier()
    return packets


def errors_of(pipeline: Any) -> list[str]:
    messages = []
    too_long = torch.zeros(17, 8, dtype=torch.bfloat16)
    for call in (
        lambda: pipeline.receive(17),
        lambda: pipeline.send(IntermediateTensors(too_long)),
        lambda: pipeline.send_sampled_tokens(torch.zeros(1)),
        lambda: pipeline.receive_sampled_tokens(torch.zeros(2, 2, dtype=torch.int32).t()),
        lambda: make_groups({"tensor": 3}, SHAPE),
        lambda: make_groups({"tensor": 4, "expert": 3}, SHAPE),
    ):
        try:
            call()
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_world(tmp_path_factory.mktemp("four"), 4, work_of_four)


def sum_of(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """In rank order, rounded once."""
    return sum(part.float() for part in parts).to(dtype)


def test_places_of_ranks(four: Found) -> None:
    for rank, found in enumerate(four):
        assert found["places"] == [(rank, 4), (rank % 2, 2), (rank // 2, 2), (rank, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_gathers_are_in_rank_order(four: Found, dtype: torch.dtype) -> None:
    total = sum_of([part_of(rank, 5, 8, dtype=dtype) for rank in range(4)], dtype)
    columns = torch.cat([part_of(rank, 3, 6, dtype=dtype) for rank in range(4)], dim=1)
    for found in four:
        assert torch.equal(found[f"sum {dtype}"], total)
        assert torch.equal(found[f"gathered {dtype}"], columns)


def test_group_sums_over_its_own_ranks(four: Found) -> None:
    for rank, found in enumerate(four):
        first = rank // 2 * 2
        assert torch.equal(found["sum of two"], part_of(first, 5, 8) + part_of(first + 1, 5, 8))


def test_padding_and_empty_tensors(four: Found) -> None:
    for found in four:
        for rows, gathered in zip((1, 3), found["cut"], strict=True):
            assert torch.equal(gathered, torch.cat([part_of(rank, rows, 6) for rank in range(4)], dim=1)[:, :17])
            assert gathered.is_contiguous()
        assert [tuple(tensor.shape) for tensor in found["nothing"]] == [(0, 8), (0, 20)]


def test_norm_of_the_sum_over_ranks_and_partial_sums(four: Found) -> None:
    x = sum_of([part_of(rank, 3, 2, 8).sum(0).bfloat16() for rank in range(4)], torch.bfloat16)
    expected = add_rms_norm_torch(x, part_of(9, 2, 8, dtype=torch.bfloat16), part_of(8, 8, dtype=torch.bfloat16), 1e-5)
    for found in four:
        assert all(map(torch.equal, found["norm"], expected))


def test_operations_wait_for_connections_and_dry_passes_do_not(four: Found) -> None:
    for found in four:
        assert found["waits"] == [0, 1, 0, 1, "no network", "no network"]


def test_steps_arrive_complete_in_order_and_at_one_address(four: Found) -> None:
    for rank, found in enumerate(four):
        for step, hidden in enumerate(found["steps"]):
            assert torch.equal(hidden, first_input(step) + sum(range(1, rank + 1)))
        assert len(found["steps"]) == len(NUM_TOKENS)
        assert len(set(found["addresses"])) == (0 if rank == 0 else 1)


def test_packets_arrive_in_order_on_every_earlier_rank(four: Found) -> None:
    for found in four[:-1]:
        assert [packet.shape[0] for packet in found["packets"]] == [0, 1, 2, 0, 1]
        for step, packet in enumerate(found["packets"]):
            assert torch.equal(packet, torch.full_like(packet, step))


TOO_LONG = "a step of 17 tokens does not fit in a pipeline's buffers, which are made for max_num_batched_tokens 16"


def test_errors_of_a_pipeline(four: Found) -> None:
    for rank, found in enumerate(four):
        receive, send, send_sampled_tokens, receive_sampled_tokens, groups, experts = found["errors"]
        assert receive == ("" if rank == 0 else TOO_LONG)
        assert send == ("the last rank of a pipeline has no next rank to send to" if rank == 3 else TOO_LONG)
        assert send_sampled_tokens == "a packet is of torch.float32; it must be of int32"
        assert "it must be contiguous" in receive_sampled_tokens
        assert "4 processes are in the world" in groups
        assert "the expert group has 3 ranks" in experts


interpreted = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's interpreter")


ALL_REDUCE_CASES = ((torch.float32, 64), (torch.bfloat16, 48), (torch.float16, 64))
NUM_ROWS = (2, 1, 3, 3, 1)
SHAPES_TO_FIT = ((1, 64), (ALL_REDUCE_ROWS, 64), (ALL_REDUCE_ROWS + 1, 48), (0, 48), (1, 32), (1, 31), (48,))


def run_custom_all_reduce(rank: int, folder: Path) -> list[Any]:
    """The kernel in Triton's interpreter on each of the first two ranks."""
    results = []
    for dtype, hidden_size in ALL_REDUCE_CASES:
        memory = shared_memory(folder / f"{dtype}", rank, 2, peer_memory_words(2, hidden_size * dtype.itemsize))
        if rank == 2:
            continue
        custom = peer_memory.CustomAllReduce(memory, rank, 2, hidden_size, dtype, CPU)
        norm = part_of(7, hidden_size, dtype=dtype)
        for call, rows in enumerate(NUM_ROWS):
            x = part_of(rank, rows, hidden_size, dtype=dtype, seed=call)
            results.append(custom.all_reduce(x))
            results.append(custom.all_reduce(x[:, :20]))  # a narrower model's, such as a drafter's
            residual = part_of(9, rows, hidden_size, dtype=dtype, seed=call)
            parts = part_of(rank, 2, rows, hidden_size, seed=call)
            results += [custom.add_rms_norm(each, residual, norm, 1e-5) for each in (x, parts)]
        results.append([custom.fits(torch.empty(shape, dtype=dtype)) for shape in SHAPES_TO_FIT])
    return results


def work_of_three(rank: int, folder: Path) -> tuple[list[Any], list[torch.Tensor]]:
    return run_custom_all_reduce(rank, folder), run_channel(rank, folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[Any], list[torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("three")
    return run_world(folder, 3, work_of_three, folder, TRITON_INTERPRET="1")


@interpreted
def test_custom_all_reduce_equals_the_separate_operations(three: list[tuple[list[Any], list[torch.Tensor]]]) -> None:
    first, second = (results for results, _ in three[:2])
    found = iter(zip(first, second, strict=True))
    for dtype, hidden_size in ALL_REDUCE_CASES:
        norm = part_of(7, hidden_size, dtype=dtype)
        for call, rows in enumerate(NUM_ROWS):
            parts = [part_of(rank, rows, hidden_size, dtype=dtype, seed=call) for rank in range(2)]
            residual = part_of(9, rows, hidden_size, dtype=dtype, seed=call)
            total = (parts[0].float() + parts[1].float()).to(dtype)
            one, other = next(found)
            assert torch.equal(one, other)
            assert_rounded(one, total)
            for narrow in next(found):
                assert torch.equal(narrow, one[:, :20])
            split = [part_of(rank, 2, rows, hidden_size, seed=call).sum(0).to(dtype).float() for rank in range(2)]
            for x in (total, (split[0] + split[1]).to(dtype)):
                one, other = next(found)
                for actual, twin, expected in zip(one, other, add_rms_norm_torch(x, residual, norm, 1e-5), strict=True):
                    assert torch.equal(actual, twin)
                    assert_rounded(actual, expected)
        is_wide = dtype is torch.float32  # a word for each value
        fits = [hidden_size == 64, hidden_size == 64, False, False, True, is_wide, False]
        assert list(next(found)) == [fits, fits]
    assert next(found, None) is None


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for bfloat16 in the interpreter, which truncates where a GPU rounds."""
    tolerance = 2**-4 if actual.dtype is torch.bfloat16 else 1e-6 if actual.dtype is torch.float32 else 1e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@compiled
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not."""
    output = run_python(
        "-m", "tests.helpers.compile_kernels", "transport", is_forked=True, TRITON_CACHE_DIR=str(tmp_path)
    )
    lines = output.splitlines()
    sums = ["_all_reduce_kernel"] * 2 + ["_all_gather_kernel"]
    channel = ["_push_kernel", "_signal_kernel", "_pull_kernel", "_signal_kernel"]
    names = [*sums, *sums, *["_linear_few_rows_kernel"] * 3, *channel]
    assert [line.split(":")[0] for line in lines] == names
    for line in lines[6:9]:  # so that all programs fit on the GPU at once
        assert int(line.split(", ")[1].split()[0]) <= MOST_REGISTERS


CHANNEL_STEPS = ((1, torch.bfloat16), (16, torch.bfloat16), (3, torch.float32), (5, torch.bfloat16))
CHANNEL_WIDTH = 600  # so that a full step takes more than one tile


def channel_input(step: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact."""
    num_tokens, dtype = CHANNEL_STEPS[step]
    return part_of(0, num_tokens, CHANNEL_WIDTH, seed=step).mul(8).round().to(dtype)


def run_channel(rank: int, folder: Path) -> list[torch.Tensor]:
    """Three ranks, each of which adds 1; the first does all of its steps before it would have to wait."""
    channel = peer_memory.P2PChannel(
        shared_memory(folder, rank, 3, peer_memory.p2p_channel_words(16, CHANNEL_WIDTH, torch.float32)), rank
    )
    found = []
    for step in range(len(CHANNEL_STEPS)):
        tensors = IntermediateTensors(channel_input(step))
        if rank > 0:
            tensors = tensors.empty_like()
            channel.receive(tensors)
            found.append(tensors.hidden_states)
        if rank < 2:
            channel.send(IntermediateTensors(tensors.hidden_states + 1))
    return found


@interpreted
def test_p2p_channel(three: list[tuple[list[Any], list[torch.Tensor]]]) -> None:
    _, second, third = (steps for _, steps in three)
    for step in range(len(CHANNEL_STEPS)):
        for added, found in ((1, second[step]), (2, third[step])):
            assert torch.equal(found, channel_input(step) + added)


@pytest.mark.parametrize(("num_sms", "rows"), [(132, 128), (114, 114), (78, 78)])
def test_sums_of_ranks_on_a_gpu_of_any_size(num_sms: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that waits must not keep another rank's program from starting."""
    monkeypatch.setattr(peer_memory, "gpu_limits", lambda device: GPULimits(num_sms, 232448, (9, 0)))
    assert peer_memory.most_rows(torch.device("cuda")) == rows
    assert peer_memory.most_rows(torch.device("cpu")) == ALL_REDUCE_ROWS


def test_supported_rows_and_sizes() -> None:
    assert peer_memory.can_send(4096, torch.bfloat16) and peer_memory.can_send(6, torch.float32)
    assert not peer_memory.can_send(6, torch.bfloat16)
    assert peer_memory.p2p_channel_words(16, 4096, torch.bfloat16) == 16 * 1024 + 16
    for size, dtype in ((4096, torch.bfloat16), (5, torch.float32), (16384, torch.float16)):
        assert peer_memory.can_all_reduce(size, dtype)
    for size, dtype in ((5, torch.bfloat16), (16385, torch.float32), (64, torch.float64)):  # the first: half a word
        assert not peer_memory.can_all_reduce(size, dtype)
    assert all_reduce_words(2, 4096 * 2) == 2 * 2 * ALL_REDUCE_ROWS * 2048
    sums = all_reduce_words(2, 4096 * 2) + 2 * 2 * RANK_SUM_ROWS * 4096
    assert peer_memory_words(2, 4096 * 2) == sums + GATHER_SETS * GATHER_WORDS

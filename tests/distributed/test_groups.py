"""Groups that communicate: sums, gathers, pipelines and sampled tokens over gloo; the custom all-reduce."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.world import run_world
from tests.helpers.interpreter import compiled, run_python  # closes gaps of the interpreter in the ranks too

from fleetfoot.distributed import ALL_REDUCE_ROWS
from fleetfoot.distributed.custom_all_reduce import (
    CustomAllReduce,
    can_all_reduce,
    custom_all_reduce_words,
)
from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, SINGLE_TENSOR_GROUP
from fleetfoot.distributed.p2p_channel import P2PChannel, can_send, p2p_channel_words
from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.distributed.torch_groups import StepShape, make_groups
from fleetfoot.kernels.elementwise import add_rms_norm_torch
from fleetfoot.records.forward_context import IntermediateTensors

CPU = torch.device("cpu")
SHAPE = StepShape(max_num_tokens=16, hidden_size=8, dtype=torch.bfloat16, device=CPU)
DTYPES = (torch.float32, torch.bfloat16)
NUM_STEPS = 5


def part_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What each rank holds, known to all."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


# --- groups of one --------------------------------------------------------------------------------------------------


def test_alone_nothing_is_communicated() -> None:
    x = torch.ones(2, 3)
    assert SINGLE_TENSOR_GROUP.all_reduce(x) is x
    assert SINGLE_TENSOR_GROUP.all_gather(x, 3) is x
    assert SINGLE_TENSOR_GROUP.reducing(add_rms_norm_torch) is add_rms_norm_torch
    assert SINGLE_TENSOR_GROUP.is_first_rank and SINGLE_TENSOR_GROUP.is_last_rank
    assert SINGLE_PIPELINE_GROUP.is_first_rank and SINGLE_PIPELINE_GROUP.is_last_rank
    assert SINGLE_PIPELINE_GROUP.receive(3) is None
    SINGLE_PIPELINE_GROUP.send_sampled_tokens(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="no next rank to send to"):
        SINGLE_PIPELINE_GROUP.send(IntermediateTensors(x))
    with pytest.raises(RuntimeError, match="sends no packets"):
        SINGLE_PIPELINE_GROUP.receive_sampled_tokens(torch.zeros(1, dtype=torch.int32))


# --- four ranks -----------------------------------------------------------------------------------------------------


def work_of_four(rank: int) -> dict[str, Any]:
    """All that four ranks do together, in one world: it takes seconds to make one."""
    found: dict[str, Any] = {}
    whole = make_groups(4, 1, SHAPE).tensor
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

    both = make_groups(2, 2, SHAPE)
    found["places"] += [(both.tensor.rank, both.tensor.size), (both.pipeline.rank, both.pipeline.size)]
    found["sum of two"] = both.tensor.all_reduce(part_of(rank, 5, 8))

    pipeline = make_groups(1, 4, SHAPE).pipeline
    found["places"] += [(pipeline.rank, pipeline.size)]
    found["steps"], found["addresses"] = run_pipeline(pipeline)
    found["packets"] = run_packets(pipeline)
    found["errors"] = errors_of(pipeline)
    return found


def sent_in(step: int, num_tokens: int) -> torch.Tensor:
    """By the first rank: whole numbers, so that sums are exact."""
    return part_of(step, num_tokens, 8).mul(8).round().bfloat16()


def run_pipeline(pipeline: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Steps of various lengths, each sent on by one rank after the other, which adds its number to it.

    A sender writes over what it has sent at once, and the first is steps ahead of the last.
    """
    steps, addresses = [], []
    for step, num_tokens in enumerate((3, 1, 16, 2, 3)):
        received = pipeline.receive(num_tokens)
        if received is None:
            received = IntermediateTensors(sent_in(step, num_tokens))
        else:
            for tensors in (received, pipeline.buffers(num_tokens)):
                assert tensors.hidden_states.shape == (num_tokens, 8)
                addresses.append(tensors.hidden_states.data_ptr())
        steps.append(received.hidden_states.clone())
        if not pipeline.is_last_rank:
            leaving = IntermediateTensors(received.hidden_states + pipeline.rank + 1)
            pipeline.send(leaving)
            leaving.hidden_states.fill_(float("nan"))
    dist.barrier()  # nobody leaves with a step on its way
    return steps, addresses


def run_packets(pipeline: Any) -> list[torch.Tensor]:
    """The last rank sends all packets before anybody takes one."""
    sizes = [(step % 3, 2) for step in range(NUM_STEPS)]  # some steps sample nothing
    if pipeline.is_last_rank:
        for step, size in enumerate(sizes):
            packet = torch.full(size, step, dtype=torch.int32)
            pipeline.send_sampled_tokens(packet)
            packet.fill_(-1)
        dist.barrier()
        return []
    received = []
    for size in sizes:
        packet = torch.full(size, -2, dtype=torch.int32)
        pipeline.receive_sampled_tokens(packet)
        received.append(packet)
    dist.barrier()
    return received


def errors_of(pipeline: Any) -> list[str]:
    messages = []
    wrong = torch.zeros(17, 8, dtype=torch.bfloat16)
    for call in (
        lambda: pipeline.receive(17),
        lambda: pipeline.send(IntermediateTensors(wrong)),
        lambda: pipeline.send_sampled_tokens(torch.zeros(1)),
        lambda: pipeline.receive_sampled_tokens(torch.zeros(2, 2, dtype=torch.int32).t()),
        lambda: make_groups(3, 1, SHAPE),
    ):
        try:
            call()
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(tmp_path_factory.mktemp("four"), 4, work_of_four)


def test_ranks_have_their_places(four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(four):
        assert found["places"] == [(rank, 4), (rank % 2, 2), (rank // 2, 2), (rank, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_made_in_rank_order_and_rounded_once(four: list[dict[str, Any]], dtype: torch.dtype) -> None:
    parts = [part_of(rank, 5, 8, dtype=dtype).float() for rank in range(4)]
    expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]).to(dtype)
    for found in four:
        assert torch.equal(found[f"sum {dtype}"], expected)


def test_a_group_sums_over_its_own_ranks(four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(four):
        first = rank // 2 * 2
        assert torch.equal(found["sum of two"], part_of(first, 5, 8) + part_of(first + 1, 5, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_gathered_in_rank_order(four: list[dict[str, Any]], dtype: torch.dtype) -> None:
    expected = torch.cat([part_of(rank, 3, 6, dtype=dtype) for rank in range(4)], dim=1)
    for found in four:
        assert torch.equal(found[f"gathered {dtype}"], expected)


def test_padding_is_cut_off_what_was_gathered(four: list[dict[str, Any]]) -> None:
    for found in four:
        for rows, gathered in zip((1, 3), found["cut"], strict=True):
            assert torch.equal(gathered, torch.cat([part_of(rank, rows, 6) for rank in range(4)], dim=1)[:, :17])
            assert gathered.is_contiguous()


def test_of_nothing_there_is_nothing(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert [tuple(tensor.shape) for tensor in found["nothing"]] == [(0, 8), (0, 20)]


def test_a_norm_takes_the_sum_over_ranks_and_partial_sums(four: list[dict[str, Any]]) -> None:
    parts = [part_of(rank, 3, 2, 8).sum(0).bfloat16().float() for rank in range(4)]
    x = (((parts[0] + parts[1]) + parts[2]) + parts[3]).bfloat16()
    expected = add_rms_norm_torch(x, part_of(9, 2, 8, dtype=torch.bfloat16), part_of(8, 8, dtype=torch.bfloat16), 1e-5)
    for found in four:
        for actual, wanted in zip(found["norm"], expected, strict=True):
            assert torch.equal(actual, wanted)


def test_steps_arrive_whole_in_order_and_at_one_address(four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(four):
        added = sum(range(1, rank + 1))
        for step, (num_tokens, hidden) in enumerate(zip((3, 1, 16, 2, 3), found["steps"], strict=True)):
            assert torch.equal(hidden, sent_in(step, num_tokens) + added)
        assert len(set(found["addresses"])) == (0 if rank == 0 else 1)


def test_packets_arrive_in_order_on_every_earlier_rank(four: list[dict[str, Any]]) -> None:
    for found in four[:-1]:
        assert [packet.shape[0] for packet in found["packets"]] == [0, 1, 2, 0, 1]
        for step, packet in enumerate(found["packets"]):
            assert torch.equal(packet, torch.full_like(packet, step))


def test_what_does_not_fit_is_refused(four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(four):
        receive, send, send_sampled_tokens, receive_sampled_tokens, groups = found["errors"]
        too_long = (
            "a step of 17 tokens does not fit in a pipeline's buffers, which are made for max_num_batched_tokens 16"
        )
        assert receive == ("" if rank == 0 else too_long)
        assert send == ("the last rank of a pipeline has no next rank to send to" if rank == 3 else too_long)
        assert send_sampled_tokens == "a packet is of torch.float32; it must be of int32"
        assert "it must be contiguous" in receive_sampled_tokens
        assert "4 processes are in the world" in groups


# --- the one-shot sum -----------------------------------------------------------------------------------------------


def sum_in_one_shot(rank: int, folder: Path) -> list[Any]:
    """The kernel in Triton's interpreter on each of two ranks, whose "GPU memory" is a file that both have mapped."""
    results = []
    for number, (dtype, hidden_size) in enumerate(ONE_SHOT_CASES):
        num_words = custom_all_reduce_words(hidden_size, dtype, 2)
        maps = [
            torch.from_file(str(folder / f"{number}-{peer}"), shared=True, size=num_words, dtype=torch.int64)
            for peer in range(2)
        ]
        dist.barrier()
        memory = PeerMemory(maps[rank], torch.tensor([each.data_ptr() for each in maps]))
        custom = CustomAllReduce(memory, rank, 2, hidden_size, dtype, CPU)
        norm = part_of(7, hidden_size, dtype=dtype)
        for call, rows in enumerate(ONE_SHOT_ROWS):
            x = part_of(rank, rows, hidden_size, dtype=dtype, seed=call)
            residual = part_of(9, rows, hidden_size, dtype=dtype, seed=call)
            parts = part_of(rank, 2, rows, hidden_size, seed=call)
            results.append(custom.all_reduce(x))
            results.append(custom.all_reduce(x[:, :20]))  # a narrower model's, such as a drafter's
            results.append(custom.add_rms_norm(x, residual, norm, 1e-5))
            results.append(custom.add_rms_norm(parts, residual, norm, 1e-5))
        results.append([custom.fits(torch.empty(shape, dtype=dtype)) for shape in SHAPES_TO_FIT])
    return results


ONE_SHOT_CASES = ((torch.float32, 64), (torch.bfloat16, 48), (torch.float16, 64))
ONE_SHOT_ROWS = (2, 1, 3, 3, 1)
SHAPES_TO_FIT = ((1, 64), (ALL_REDUCE_ROWS, 64), (ALL_REDUCE_ROWS + 1, 48), (0, 48), (1, 32), (1, 31), (48,))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter")
def test_the_one_shot_sum_is_that_of_the_steps_apart(tmp_path: Path) -> None:
    first, second = run_world(tmp_path, 2, sum_in_one_shot, tmp_path, TRITON_INTERPRET="1")
    found = iter(zip(first, second, strict=True))
    for dtype, hidden_size in ONE_SHOT_CASES:
        norm = part_of(7, hidden_size, dtype=dtype)
        for call, rows in enumerate(ONE_SHOT_ROWS):
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
    """Equal, but for what the interpreter does to bfloat16: it cuts off where a GPU rounds."""
    tolerance = 2**-4 if actual.dtype is torch.bfloat16 else 1e-6 if actual.dtype is torch.float32 else 1e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@compiled
def test_what_goes_through_peers_memory_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter forgives what the compiler does not."""
    output = run_python("-m", "tests.distributed.compile_transport_kernels", TRITON_CACHE_DIR=str(tmp_path))
    names = [line.split(":")[0] for line in output.splitlines()]
    assert names == [*["_all_reduce_kernel"] * 4, "_push_kernel", "_signal_kernel", "_pull_kernel", "_signal_kernel"]


# --- the P2P channel of a pipeline ------------------------------------------------------------------------------------

CHANNEL_STEPS = ((1, torch.bfloat16), (16, torch.bfloat16), (3, torch.float32), (5, torch.bfloat16))
CHANNEL_WIDTH = 600  # so that a full step takes more than one tile


def channel_input(step: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact."""
    num_tokens, dtype = CHANNEL_STEPS[step]
    return part_of(0, num_tokens, CHANNEL_WIDTH, seed=step).mul(8).round().to(dtype)


def pass_along(rank: int, folder: Path) -> list[torch.Tensor]:
    """Three ranks, each of which adds its own; the first does all of its steps before it would have to wait."""
    num_words = p2p_channel_words(16, CHANNEL_WIDTH, torch.float32)
    maps = [
        torch.from_file(str(folder / str(peer)), shared=True, size=num_words, dtype=torch.int64) for peer in range(3)
    ]
    dist.barrier()
    channel = P2PChannel(PeerMemory(maps[rank], torch.tensor([each.data_ptr() for each in maps])), rank)
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter")
def test_steps_go_through_the_receivers_memory(tmp_path: Path) -> None:
    _, second, third = run_world(tmp_path, 3, pass_along, tmp_path, TRITON_INTERPRET="1")
    for step in range(len(CHANNEL_STEPS)):
        for added, found in ((1, second[step]), (2, third[step])):
            assert torch.equal(found, channel_input(step) + added)


def test_what_a_channel_can_send() -> None:
    assert can_send(4096, torch.bfloat16) and can_send(6, torch.float32)
    assert not can_send(6, torch.bfloat16)
    assert p2p_channel_words(16, 4096, torch.bfloat16) == 16 * 1024 + 16


def test_which_rows_can_be_summed_in_one_shot() -> None:
    assert (
        can_all_reduce(4096, torch.bfloat16)
        and can_all_reduce(5, torch.float32)
        and can_all_reduce(16384, torch.float16)
    )
    assert not can_all_reduce(5, torch.bfloat16)  # half a word
    assert not can_all_reduce(16385, torch.float32)
    assert not can_all_reduce(64, torch.float64)
    assert custom_all_reduce_words(4096, torch.bfloat16, 2) == 2 * 2 * ALL_REDUCE_ROWS * 2048

"""Sums over the GPUs of a tensor group: whether they are right, and how long they take; gathers and pipelines too.

    python benchmarks/tp_allreduce.py                  # all GPUs of this machine
    python benchmarks/tp_allreduce.py --ranks 2 --hidden 8192

One process a GPU. Every way is checked against a float64 sum of random values, and for the same bits on all ranks,
before it is timed. Times are microseconds for one sum, the median of rounds on the slowest rank: "eager" of calls one
after the other, where the host may be the limit; "graph" of 64 of them captured and replayed.

    fleetfoot      the group's own: our kernel up to 128 rows, then NCCL
    + norm         the same with residual sum and RMSNorm, in one kernel up to 128 rows
    nccl + norm    the same, apart
    one-shot       torch.ops.symm_mem.one_shot_all_reduce_copy
    two-shot       torch.ops.symm_mem.two_shot_all_reduce_ and the copies to and from its buffer

A "chain" is the linear layers and norms of a decode step of an 8B Llama's layers as one rank of the group has them,
with sums over ranks and without: the difference is what the sums cost where other kernels overlap with them. For up to
8 rows also with sums within the linear layers and deferred norms ("in layers"), and the same without sums ("deferred").
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as mp

from fleetfoot.config import env
from fleetfoot.distributed.groups import CudaTensorGroup, StepShape, TorchPipelineGroup, make_groups
from fleetfoot.distributed.peer_memory import NO_MULTICAST
from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.linear.rank_sums import RANK_SUM_ROWS, RankSums
from fleetfoot.kernels.linear.roles import InputRole, OutputRole
from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
from fleetfoot.kernels.runtime.gpu_limits import has_hopper_kernels
from fleetfoot.records.forward_context import IntermediateTensors

CALLS, REPLAYS, ROUNDS = 64, 10, 7
GIVE_UP_AFTER = 300
"""Seconds after which a process that waits for another says where, and ends."""
DTYPE = torch.bfloat16
EPS = 1e-5
LAYERS, INTERMEDIATE, VOCAB = 32, 14336, 128256

Call = Callable[[], Any]
Sum = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--kib", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error(f"{arguments.ranks} ranks have nothing to sum; 2 GPUs are the least")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (arguments, folder), nprocs=arguments.ranks)


def run(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    faulthandler.dump_traceback_later(GIVE_UP_AFTER, exit=True)
    torch.cuda.set_device(rank)
    meeting_point = f"file://{Path(folder) / 'meeting-point'}"
    dist.init_process_group("gloo", init_method=meeting_point, world_size=arguments.ranks, rank=rank)
    shape = StepShape(8192, arguments.hidden, DTYPE, torch.device("cuda", rank))
    with torch.inference_mode():
        group = make_groups({"tensor": arguments.ranks}, shape).tensor
        assert isinstance(group, CudaTensorGroup)
        say(f"{arguments.ranks} x {torch.cuda.get_device_name()}, hidden size {arguments.hidden}, {DTYPE}")
        for part in arguments.only:
            PARTS[part](group, shape, arguments)
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


# --- sums -----------------------------------------------------------------------------------------------------------


def compare_sums(group: CudaTensorGroup, shape: StepShape, arguments: argparse.Namespace) -> None:
    most = max(arguments.kib) * 1024 // (2 * shape.hidden_size)
    sums = {name: way for name, way in ways_to_sum(group, shape, most).items() if is_there(way, shape)}
    norms = ways_to_sum_and_norm(group, shape)
    say(f"\n{'KiB':>6} {'rows':>5}  " + "".join(f"{name:>20}" for name in (*sums, *norms)) + "   us eager / graph")
    for kib in arguments.kib:
        rows = max(1, kib * 1024 // (2 * shape.hidden_size))
        columns = []
        for way in sums.values():
            check_sum(way, group, rows, shape)
            x = torch.zeros(rows, shape.hidden_size, dtype=DTYPE, device=shape.device)
            columns.append(times(functools.partial(way, x)))
        for way in norms.values():
            check_sum(functools.partial(total_of, way), group, rows, shape)
            x = torch.zeros(rows, shape.hidden_size, dtype=DTYPE, device=shape.device)
            columns.append(times(functools.partial(way, x, x.clone())))
        say(f"{kib:>6} {rows:>5}  " + "".join(f"{column:>20}" for column in columns))


def ways_to_sum(group: CudaTensorGroup, shape: StepShape, most_rows: int) -> dict[str, Sum]:
    name = group.process_group.group_name
    with env.variable(NO_MULTICAST, "1"):
        buffer = symmetric_memory.empty(most_rows * shape.hidden_size, dtype=DTYPE, device=shape.device)
        symmetric_memory.rendezvous(buffer, group.process_group)

    def nccl(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=group.process_group)
        return x

    def one_shot(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer[: x.numel()], x.view(-1), "sum", name).view_as(x)

    def two_shot(x: torch.Tensor) -> torch.Tensor:
        part = buffer[: x.numel()]
        part.copy_(x.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", name)
        return part.view_as(x).clone()

    return {"fleetfoot": group.all_reduce, "nccl": nccl, "one-shot": one_shot, "two-shot": two_shot}


def gpu_kernels(device: torch.device) -> Kernels:
    """What an engine has there."""
    return load_kernels(plan_kernels(DeviceFacts("cuda", has_triton=True, has_hopper=has_hopper_kernels(device))))


def ways_to_sum_and_norm(group: CudaTensorGroup, shape: StepShape) -> dict[str, Callable[..., Any]]:
    ops, weight = (
        gpu_kernels(shape.device),
        torch.ones(shape.hidden_size, dtype=DTYPE, device=shape.device),
    )
    fused = group.reducing(ops.add_rms_norm)

    def apart(x: torch.Tensor, residual: torch.Tensor) -> Any:
        dist.all_reduce(x, group=group.process_group)
        return ops.add_rms_norm(x, residual, weight, EPS)

    return {"+ norm": lambda x, residual: fused(x, residual, weight, EPS), "nccl + norm": apart}


def total_of(way: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return way(x, torch.zeros_like(x))[1]


def is_there(way: Sum, shape: StepShape) -> bool:
    """Whether this torch has the operation, here."""
    try:
        way(torch.zeros(1, shape.hidden_size, dtype=DTYPE, device=shape.device))
    except (RuntimeError, AttributeError) as error:
        say(f"left out: {error}")
        return False
    return True


def check_sum(way: Sum, group: CudaTensorGroup, rows: int, shape: StepShape) -> None:
    """Calls of varying sizes, with inputs of their own, first as they come and then out of a graph."""
    generator = torch.Generator(shape.device).manual_seed(group.rank)
    for size in (rows, 1, rows, max(1, rows - 1), rows):
        x = torch.randn(size, shape.hidden_size, generator=generator, device=shape.device).to(DTYPE)
        check_one(way(x.clone()), x)
    x = torch.empty(rows, shape.hidden_size, dtype=DTYPE, device=shape.device)
    graph, found = captured(lambda: [way(x.clone()) for _ in range(3)])
    for _ in range(3):
        x.copy_(torch.randn(x.shape, generator=generator, device=shape.device))
        graph.replay()
        for each in found:
            check_one(each, x)


def check_one(found: torch.Tensor, x: torch.Tensor) -> None:
    parts, results = gathered_on_host(x), gathered_on_host(found)
    expected = torch.stack(parts).double().sum(dim=0)
    assert all(torch.equal(result, results[0]) for result in results), "ranks have different bits"
    error = (found.cpu().double() - expected).abs()
    # Rounded once, the error is at most 2^-9 of the sum; NCCL rounds after each addition.
    scale = torch.stack(parts).double().abs().sum(dim=0)
    assert bool((error <= 2**-8 * scale + 1e-6).all()), f"wrong by {error.max():.3g}"


def gathered_on_host(x: torch.Tensor) -> list[torch.Tensor]:
    own = x.cpu().contiguous().view(torch.int16)
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own)
    return [each.view(x.dtype) for each in everybody]


# --- gathers, chains, pipelines ---------------------------------------------------------------------------------------


def gathers(group: CudaTensorGroup, shape: StepShape, arguments: argparse.Namespace) -> None:
    say("\nlogits gathered, us eager / graph")
    for rows in (1, 8, 64):
        width = VOCAB // group.size
        x = torch.full((rows, width), group.rank, dtype=DTYPE, device=shape.device)
        found = group.all_gather(x, VOCAB - 3)
        wanted = torch.arange(group.size, device=shape.device).repeat_interleave(width)[: VOCAB - 3]
        assert torch.equal(found, wanted.to(DTYPE).expand(rows, -1))
        say(f"{rows:>6} rows {times(functools.partial(group.all_gather, x, VOCAB - 3), calls=8):>20}")


def chains(group: CudaTensorGroup, shape: StepShape, arguments: argparse.Namespace) -> None:
    ops, hidden = (
        gpu_kernels(shape.device),
        shape.hidden_size,
    )

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, dtype=DTYPE, device=shape.device) * 0.02

    norm = torch.ones(hidden, dtype=DTYPE, device=shape.device)
    layers = [
        (
            ops.linear_chain(weight(hidden, hidden // group.size), None, OutputRole()),
            ops.linear_chain(weight(2 * INTERMEDIATE // group.size, hidden), None, InputRole("gated")),
            ops.linear_chain(weight(hidden, INTERMEDIATE // group.size), None, OutputRole()),
        )
        for _ in range(LAYERS)
    ]

    def by_nccl(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        total = x if x.ndim == residual.ndim else x.sum(dim=0).to(residual.dtype)
        dist.all_reduce(total, group=group.process_group)
        return ops.add_rms_norm(total, residual, weight, eps)

    ways = {"no sums": ops.add_rms_norm, "fleetfoot": group.reducing(ops.add_rms_norm), "nccl": by_nccl}
    say(f"\nchain of {LAYERS} layers: us for a step in a graph, and for each of its {2 * LAYERS} sums")
    for rows in (1, 8, 32, 64, 128):
        x = torch.randn(rows, hidden, dtype=DTYPE, device=shape.device)

        def step(add_rms_norm: Any, x: torch.Tensor = x) -> torch.Tensor:
            residual, width = x, hidden // group.size
            for o, gate_up, down in layers:
                x, residual = add_rms_norm(o(x[:, :width].contiguous()), residual, norm, EPS)
                x, residual = add_rms_norm(down(gate_up(x)), residual, norm, EPS)
            return x

        def deferred_step(rank_sums: RankSums | None, x: torch.Tensor = x) -> torch.Tensor:
            residual, width = x, hidden // group.size
            hidden_states: Any = x
            for o, gate_up, down in layers:
                x = hidden_states if hidden_states is residual else hidden_states.weighted
                for layer in (o, down):
                    inputs = x[:, :width] if layer is o else gate_up(hidden_states)
                    hidden_states = layer.add_and_norm(inputs, residual, norm, EPS, rank_sums)
                    residual = hidden_states.total
            return residual

        steps: dict[str, Call] = {name: functools.partial(step, way) for name, way in ways.items()}
        if rows <= RANK_SUM_ROWS and group.rank_sums is not None:
            steps["in layers"] = functools.partial(deferred_step, group.rank_sums)
            steps["deferred"] = functools.partial(deferred_step, None)
        found = {name: graph_time(call, calls=1) for name, call in steps.items()}
        base = found["no sums"]
        text = "".join(f"{name:>12} {us:>7.0f} ({(us - base) / (2 * LAYERS):>5.2f})" for name, us in found.items())
        say(f"{rows:>6} rows {text}")


def pipelines(group: CudaTensorGroup, shape: StepShape, arguments: argparse.Namespace) -> None:
    """All ranks as one pipeline, the first as far ahead as it can be: steps and packets arrive whole and in order."""
    pipeline = make_groups({"pipeline": arguments.ranks}, shape).pipeline
    assert isinstance(pipeline, TorchPipelineGroup)
    for num_tokens in (1, 64, 8192):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        num_steps, wrong = 50, []
        for step in range(num_steps):
            if step == 10:
                begin.record()
            received = pipeline.receive(num_tokens)
            if received is None:
                values = torch.full((num_tokens, shape.hidden_size), step, dtype=DTYPE, device=shape.device)
                received = IntermediateTensors(values)
            wrong.append((received.hidden_states != step).sum())
            if not pipeline.is_last_rank:
                leaving = IntermediateTensors(received.hidden_states.clone())
                pipeline.send(leaving)
                leaving.hidden_states.fill_(-1)
            else:
                packet = torch.full((num_tokens, 2), step, dtype=torch.int32, device=shape.device)
                pipeline.send_sampled_tokens(packet)
                packet.fill_(-1)
        end.record()
        if not pipeline.is_last_rank:
            for step in range(num_steps):
                packet = torch.empty((num_tokens, 2), dtype=torch.int32, device=shape.device)
                pipeline.receive_sampled_tokens(packet)
                wrong.append((packet != step).sum())
        torch.cuda.synchronize()
        assert int(sum(int(count) for count in wrong)) == 0, "a step did not arrive whole"
        time = begin.elapsed_time(end) * 1000 / (num_steps - 10)
        dist.barrier()
        say(f"{num_tokens:>6} tokens passed along a pipeline of {pipeline.size}: {slowest(time):.1f} us a step")


# --- times ----------------------------------------------------------------------------------------------------------


def times(call: Call, calls: int = CALLS) -> str:
    return f"{eager_time(call, calls):.1f} / {graph_time(call, calls):.1f}"


def eager_time(call: Call, calls: int = CALLS) -> float:
    def many() -> None:
        for _ in range(calls):
            call()

    many()
    return measure(many) / calls


def graph_time(call: Call, calls: int = CALLS) -> float:
    graph, _ = captured(lambda: [call() for _ in range(calls)])

    def many() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return measure(many) / (calls * REPLAYS)


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    work()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = work()
    return graph, output


def measure(work: Call) -> float:
    """Microseconds on the slowest rank, the median of rounds."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) * 1000)
    return slowest(statistics.median(rounds))


def slowest(time: float) -> float:
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, time)
    return max(found)


PARTS: dict[str, Callable[..., None]] = {
    "sums": compare_sums,
    "gathers": gathers,
    "chains": chains,
    "pipelines": pipelines,
}

if __name__ == "__main__":
    main()

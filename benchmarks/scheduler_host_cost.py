"""Host cost of the scheduler: microseconds of one schedule-plus-update step, with nothing behind it.

Usage: python benchmarks/scheduler_host_cost.py [--requests 256] [--steps 2000] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import statistics
import time

from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig


def build(num_requests: int, num_steps: int, prompt_len: int = 128) -> Scheduler:
    """A scheduler whose requests all decode, with room for every step."""
    blocks = num_requests * (-(-(prompt_len + num_steps + 16) // 16) + 1)
    scheduler = Scheduler(SchedulerConfig(blocks, 16, num_requests, max(8192, num_requests)))
    params = SamplingParams(max_tokens=num_steps + 16, ignore_eos=True)
    for number in range(num_requests):
        prompt = [(number * 7919 + position) % 50000 for position in range(prompt_len)]
        scheduler.add_request(Request(str(number), prompt, params, max_tokens=num_steps + 16, seed=number))
    while True:
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(output, ModelRunnerOutput([[5]] * output.num_sampled))
        if output.num_decodes == num_requests:
            return scheduler


def measure(scheduler: Scheduler, num_steps: int, num_requests: int) -> tuple[list[float], list[float]]:
    """Seconds of each `schedule` and each `update`."""
    schedule_times, update_times = [], []
    sampled = [[5 + number % 100] for number in range(num_requests)]
    for _ in range(num_steps):
        begin = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        assert output is not None
        scheduler.update(output, ModelRunnerOutput(sampled))
        end = time.perf_counter()
        schedule_times.append(middle - begin)
        update_times.append(end - middle)
    return schedule_times, update_times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    scheduler = build(args.requests, args.steps)
    profiler = cProfile.Profile()
    if args.profile:
        profiler.enable()
    schedule_times, update_times = measure(scheduler, args.steps, args.requests)
    if args.profile:
        profiler.disable()
        profiler.print_stats("tottime")
    both = [a + b for a, b in zip(schedule_times, update_times, strict=True)]
    print(
        json.dumps(
            {
                "requests": args.requests,
                "steps": args.steps,
                "schedule_us": round(1e6 * statistics.median(schedule_times), 1),
                "update_us": round(1e6 * statistics.median(update_times), 1),
                "step_us": round(1e6 * statistics.median(both), 1),
                "step_us_mean": round(1e6 * statistics.fmean(both), 1),
                "step_us_p99": round(1e6 * sorted(both)[int(0.99 * len(both))], 1),
            }
        )
    )


if __name__ == "__main__":
    main()

"""`/metrics`: its text, and while the engine computes a step."""

import asyncio
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fleetfoot.server.app import StateEndpoints
from fleetfoot.server.metrics import render_metrics


class Engine:
    """Answers a call when `running` is set, with that value."""

    def __init__(self) -> None:
        self.num_unfinished = 0
        self.running: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call(self, method: str) -> Any:
        return {"gauges": {"num_requests_running": await asyncio.shield(self.running)}}


def test_values_of_a_moment_ago_while_a_step_takes_long() -> None:
    async def run() -> None:
        engine = Engine()
        service: Any = SimpleNamespace(engine=engine, model_name="m", liveness=SimpleNamespace(problem=""))
        state = StateEndpoints(service)

        async def running() -> str:
            lines = bytes((await state.metrics(None)).body).decode().splitlines()  # type: ignore[arg-type]
            return next(line for line in lines if line.startswith("fleetfoot:num_requests_running"))[-3:]

        first = asyncio.ensure_future(running())
        await asyncio.sleep(0)
        assert not first.done()  # there are none yet
        engine.running.set_result(3)
        assert await first == "3.0"
        engine.running, engine.num_unfinished = asyncio.get_running_loop().create_future(), 1
        assert await running() == "3.0"
        engine.num_unfinished = 0  # an answer does not take long
        last = asyncio.ensure_future(running())
        await asyncio.sleep(0)
        engine.running.set_result(4)
        assert await last == "4.0"

    asyncio.run(run())


def renamed(old: str) -> str:
    return old.replace("gpu_", "kv_").replace("time_per_output_token", "inter_token_latency")


def test_the_text_is_what_prometheus_parses() -> None:
    values = {
        "gauges": {"num_requests_running": 3, "kv_cache_usage_perc": 0.25, "unknown": 1},
        "counters": {"prompt_tokens": 2e9},
        "finished": {"stop": 4, "length": 5},
        "labelled": {"engine_sleep_state": [({"sleep_state": "awake"}, True)], "cache_config_info": [({"a": 'b"'}, 1)]},
        "histograms": {"inter_token_latency_seconds": {"buckets": [[0.001, 1], [0.5, 2], ["+Inf", 6]], "sum": 7.5}},
    }
    model = 'a\\b"c\nd'
    text = render_metrics([{**values, "engine": "0"}, {**values, "engine": "1"}], model).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for prefix in ("fleetfoot", "vllm"):
        found = {}
        for family in families.values():
            for sample in family.samples:
                labels = sample.labels
                if sample.name.startswith(prefix) and (labels["model_name"], labels["engine"]) == (model, "1"):
                    name = sample.name.removeprefix(f"{prefix}:")
                    names = "le", "finished_reason", "sleep_state", "a"
                    found[name, next((labels[name] for name in names if name in labels), None)] = sample.value
        old = {name: found.pop(name) for name in [*found] if name[0].startswith(("gpu_", "time_per"))}
        assert len(old) == (6 if prefix == "vllm" else 0)
        assert all(value == found[renamed(name), label] for (name, label), value in old.items())
        assert found == {
            ("num_requests_running", None): 3,
            ("kv_cache_usage_perc", None): 0.25,
            ("prompt_tokens_total", None): 2e9,
            ("engine_sleep_state", "awake"): 1,
            ("cache_config_info", 'b"'): 1,
            ("request_success_total", "stop"): 4,
            ("request_success_total", "length"): 5,
            **{("request_success_total", reason): 0 for reason in ("abort", "error")},
            ("inter_token_latency_seconds_bucket", "0.001"): 1,
            ("inter_token_latency_seconds_bucket", "0.5"): 2,
            ("inter_token_latency_seconds_bucket", "+Inf"): 6,
            ("inter_token_latency_seconds_count", None): 6,
            ("inter_token_latency_seconds_sum", None): 7.5,
        }
        kinds = {name: families[f"{prefix}:{name}"].type for name in ("prompt_tokens", "inter_token_latency_seconds")}
        assert kinds == {"prompt_tokens": "counter", "inter_token_latency_seconds": "histogram"}

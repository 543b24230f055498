"""The server as a deployment of Ray Serve: OpenAI's API over Serve's proxy, Ray's protocol of servers, autoscaling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.helpers.ray_places import Body
from tests.helpers.routers import free_ports

from fleetfoot import LLM, SamplingParams

pytestmark = [pytest.mark.contracts, pytest.mark.filterwarnings("default")]  # Ray's own warnings are no failures

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
SETTINGS: dict[str, Any] = {
    "model_id": "story",
    "engine_kwargs": {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 1 << 26},
    "deployment_config": {
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 4,
            "upscale_delay_s": 0,
            "downscale_delay_s": 1,
            "look_back_period_s": 1,
            "metrics_interval_s": 0.2,
        }
    },
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Any]]:
    """The address of Serve's proxy, and a handle of the deployment."""
    import ray
    from ray import serve

    from fleetfoot.server.ray_serve import build_app

    port = free_ports(1)[0]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", paths)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        handle = serve.run(build_app(SETTINGS), route_prefix="/")
        yield f"http://127.0.0.1:{port}", handle
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> str:
    """The text of one engine in this process."""
    with LLM(dtype="float32") as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text


def test_serve_answers_as_the_server_does(served: tuple[str, Any], expected: str) -> None:
    options: dict[str, Any] = {"model": "story", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", timeout=60) as client:
        assert client.completions.create(**options).choices[0].text == expected
        events = list(client.completions.create(**options, stream=True))
        assert len(events) > 5 and "".join(event.choices[0].text for event in events) == expected
        assert [model.id for model in client.models.list()] == ["story"]
        with pytest.raises(openai.BadRequestError) as refusal:
            client.completions.create(**{**options, "temperature": -1})
        assert refusal.value.param == "temperature"


def test_a_replica_has_as_many_gpus_as_ranks() -> None:
    from fleetfoot.server.ray_serve import FleetfootServer, ReplicaSettings

    for kwargs, given, expected in (
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}, 4),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, {}, 0),
        ({"tensor_parallel_size": 2, "device": "cpu"}, {}, 0),
        ({}, {"ray_actor_options": {"num_gpus": 0.5, "num_cpus": 3}}, 0.5),
    ):
        options = FleetfootServer.get_deployment_options(
            ReplicaSettings("x", None, kwargs, {"max_ongoing_requests": 9, **given})
        )
        assert options["max_ongoing_requests"] == 9
        assert options["ray_actor_options"] == {**given.get("ray_actor_options", {}), "num_gpus": expected}


def test_rays_protocol_of_servers(served: tuple[str, Any], expected: str) -> None:
    handle = served[1]
    body = Body(model="story", prompt=PROMPT, max_tokens=20, temperature=0, stream=True)
    events = "".join(handle.options(stream=True).completions.remote(body))
    assert events.endswith("data: [DONE]\n\n") and events.count("data: {") > 5
    call = {name: getattr(handle, name) for name in ("is_sleeping", "is_paused", "pause", "resume", "check_health")}
    assert (call["is_sleeping"].remote().result(), call["is_paused"].remote().result()) == (False, False)
    call["pause"].remote().result()
    assert call["is_paused"].remote().result() is True
    call["resume"].remote().result()
    handle.reset_prefix_cache.remote().result()
    assert call["check_health"].remote().result() is None
    assert handle.llm_config.remote().result().model_id == "story"


def num_running() -> int:
    """Replicas that answer requests."""
    from ray import serve

    (application,) = serve.status().applications.values()
    return sum(one.replica_states.get("RUNNING", 0) for one in application.deployments.values())


def test_replicas_come_under_load_and_go_after_it(served: tuple[str, Any], expected: str) -> None:
    """Requests go on until Serve has done as it says; each has the answer of one engine."""
    options: dict[str, Any] = {"model": "story", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", timeout=60) as client:

        def answer(_: int) -> str:
            return client.completions.create(**options).choices[0].text

        with ThreadPoolExecutor(16) as threads:
            while num_running() < 2:
                assert {*threads.map(answer, range(64))} == {expected}
            assert {*threads.map(answer, range(64))} == {expected}
        while num_running() > 1:
            assert answer(0) == expected


def test_rays_own_builder_of_applications(served: tuple[str, Any], expected: str) -> None:
    """``build_openai_app`` with ``server_cls``; it imports the types of an installed vLLM or SGLang."""
    llm = pytest.importorskip("ray.serve.llm", exc_type=ImportError)
    from ray import serve

    config = llm.LLMConfig(
        model_loading_config={"model_id": "story"},
        server_cls="fleetfoot.server.ray_serve:FleetfootServer",
        engine_kwargs=SETTINGS["engine_kwargs"],
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
    )
    serve.run(llm.build_openai_app({"llm_configs": [config]}), name="built", route_prefix="/built")
    options: dict[str, Any] = {"model": "story", "max_tokens": 20, "temperature": 0}
    messages = [{"role": "user", "content": PROMPT}]
    with openai.OpenAI(base_url=f"{served[0]}/built/v1", api_key="none", timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["story"]
        assert client.completions.create(**options, prompt=PROMPT).choices[0].text == expected
        events = list(client.completions.create(**options, prompt=PROMPT, stream=True))
        assert "".join(event.choices[0].text for event in events) == expected
        whole = client.chat.completions.create(**options, messages=messages).choices[0].message.content
        parts = [event.choices[0].delta.content or "" for event in client.chat.completions.create(
            **options, messages=messages, stream=True)]  # fmt: skip
        assert "".join(parts) == whole
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{**options, "temperature": -1}, prompt=PROMPT)
    serve.delete("built")

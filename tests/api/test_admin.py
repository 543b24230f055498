"""Routes that change the engine, of a server with two API servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from fleetfoot.assets import embedded_model_path
from fleetfoot.cli.main import main
from tests.helpers.server import RunningServer

BODY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
ADMIN = {"Authorization": "Bearer root"}
FLAGS = (
    *("--dtype", "float32", "--api-key", "secret", "--api-server-count", "2", "--enable-sleep-mode"),
    *("--enable-admin-routes", "--admin-key", "root"),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningServer]:
    with RunningServer(*FLAGS) as running:
        yield running


@pytest.fixture
def admin(engine: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, headers=ADMIN, timeout=60) as client:
        yield client


def generate(engine: RunningServer, **fields: Any) -> httpx.Response:
    """Over a new connection, which either API server may get."""
    headers = {"Authorization": "Bearer secret"}
    return httpx.post(f"{engine.url}/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def text(engine: RunningServer) -> str:
    return str(generate(engine).json()["choices"][0]["text"])


def test_keys_open_their_own_routes_alone(engine: RunningServer, admin: httpx.Client) -> None:
    for headers in ({}, {"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        assert httpx.post(f"{engine.url}/sleep", headers=headers).status_code == 401
    assert admin.get("/v1/models").status_code == 401
    assert admin.get("/is_sleeping").json() == {
        "status": "ok", "is_paused": False, "is_sleeping": False, "weight_version": 0
    }  # fmt: skip
    assert "root" not in "".join(engine.log)


def test_the_routes_are_documented(admin: httpx.Client, engine: RunningServer) -> None:
    headers = {"Authorization": "Bearer secret"}
    document = httpx.get(f"{engine.url}/openapi.json", headers=headers).json()
    OpenAPIV31SpecValidator(document).validate()
    assert set(document["paths"]["/sleep"]["post"]["responses"]) >= {"200", "400", "401", "409"}
    schema = {"$ref": "#/components/schemas/AdminState", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(admin.get("/is_sleeping").json())


def test_without_the_flag_there_are_no_such_routes(client: httpx.Client) -> None:
    assert client.post("/sleep").status_code == client.get("/is_paused").status_code == 404


def test_weights_and_settings(engine: RunningServer, admin: httpx.Client, text: str) -> None:
    name = "model.norm.weight"
    (before,) = admin.post("/weight_checksums", params={"names": name}).json()["checksums"].values()
    patch = {"name": name, "indices": [0, 1], "values": [4.0, -4.0]}
    answer = admin.post("/update_weights", json={"patches": [patch], "mode": "keep"}).json()
    version = answer["weight_version"]
    assert version == 1 and admin.get("/weight_version").json()["weight_version"] == 1
    assert admin.post("/weight_checksums", json={"names": [name]}).json()["checksums"][name] != before
    assert generate(engine).json()["choices"][0]["text"] != text
    path = str(embedded_model_path())
    assert admin.post("/update_weights", json={"weights_path": path}).json()["weight_version"] == 2
    assert generate(engine).json()["choices"][0]["text"] == text
    assert admin.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200
    assert admin.post("/collective_rpc", json={"method": "weight_checksums", "args": [[name]]}).json()["results"]
    assert admin.post("/collective_rpc", json={"method": "compiled_kernels"}).json()["results"] == [[0, 0]]
    assert generate(engine, logprobs=3).status_code == 200
    admin.post("/update_config", json={"overrides": {"max_logprobs": 2}}).raise_for_status()
    refused = {generate(engine, logprobs=3).status_code for _ in range(6)}  # of both API servers
    admin.post("/update_config", json={"overrides": {"max_logprobs": 20}}).raise_for_status()
    assert refused == {400}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/sleep?level=3", None, 400, "level"),
        ("/sleep", {"level": "deep"}, 400, "level"),
        ("/sleep", {"level": 2**64}, 400, None),
        ("/sleep?depth=1", None, 400, "depth"),
        ("/pause", {"mode": "drain"}, 400, "mode"),
        ("/wake_up", {"tags": ["lora"]}, 400, "tags"),
        ("/abort_requests", {}, 400, "request_ids"),
        ("/update_weights", {}, 400, "update_info"),
        ("/update_weights", {"update_info": {"nonsense": 1}}, 400, None),
        ("/update_weights", {"weights_path": "/nothing"}, 400, None),
        ("/update_weights", {"patches": [{"name": "x", "indices": [0], "values": [1.0]}]}, 400, None),
        ("/update_weights", {"update_info": {}}, 400, "update_info.names"),
        ("/update_weights", {"update_info": {"names": "x"}}, 400, "update_info.names"),
        ("/update_weights", {"update_info": {"names": ["x"], "shapes": [[1.5]]}}, 400, "update_info.shapes"),
        ("/update_weights", {"patches": [{"name": 1, "indices": [0], "values": [1]}]}, 400, "patches[0].name"),
        ("/update_weights", {"patches": [{"name": "x", "indices": "a", "values": [1]}]}, 400, "patches[0].indices"),
        ("/update_weights", {"patches": [{"name": "x", "indices": [0], "values": [{}]}]}, 400, "patches[0].values"),
        ("/update_weights", {"patches": [{"name": "x", "indices": [0], "values": [1], "shape": 1}]}, 400,
         "patches[0].shape"),
        ("/init_weight_transfer", {}, 400, "init_info"),
        ("/init_weight_transfer", {"init_info": {}}, 400, "init_info.master_address"),
        ("/init_weight_transfer", {"init_info": {"master_address": 3}}, 400, "init_info.master_address"),
        ("/init_weight_transfer", {"init_info": {"master_address": "a", "master_port": 9, "world_size": 2**40}}, 400,
         "init_info.world_size"),
        ("/update_config", {"overrides": {"dtype": "float16"}}, 400, "overrides.dtype"),
        ("/update_config", {"overrides": {"max_logprobs": "x"}}, 400, "overrides.max_logprobs"),
        ("/start_weight_update", {"mode": "x"}, 400, "mode"),
        ("/finish_weight_update", None, 400, None),
        ("/start_profile", None, 400, None),
        ("/collective_rpc", {"method": "nonsense"}, 400, "method"),
        ("/collective_rpc", {"method": "shutdown"}, 400, "method"),
        ("/collective_rpc", {"method": "call_weights", "args": ["stage_saved", "/tmp", []]}, 400, "method"),
        ("/collective_rpc", {"method": "compiled_kernels", "args": [1]}, 400, "args"),
        ("/collective_rpc", {"method": "sleep", "args": [1, "keep", 3]}, 400, "args"),
        ("/collective_rpc", {"method": "sleep", "args": [1], "kwargs": {"level": 1}}, 400, "kwargs.level"),
        ("/collective_rpc", {"method": "sleep", "kwargs": {"depth": 1}}, 400, "kwargs.depth"),
        ("/collective_rpc", {"method": "reload_weights", "args": [1]}, 400, "kwargs.weights"),
        ("/collective_rpc", {"method": "update_config", "kwargs": {"overrides": 1}}, 400, "kwargs.overrides"),
        ("/resume", [], 400, None),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(admin: httpx.Client, path: str, body: Any, status: int, param: str | None) -> None:
    response = admin.post(path, json=body) if body is not None else admin.post(path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param or error["param"]), error
    assert error["message"] and "argument" not in error["message"]
    assert admin.get("/is_paused").json()["is_paused"] is False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enable-admin-routes"], "needs a key"),
        (["--admin-key", "x"], "without --enable-admin-routes"),
        (["--enable-admin-routes", "--admin-key", "x", "--api-key", "x"], "choose another"),
        (["--enable-admin-routes", "--admin-key", ""], "not be empty"),
    ],
    ids=str,
)
def test_flags_that_cannot_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.delenv("FLEETFOOT_ADMIN_KEY", raising=False)
    assert main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_key_from_a_file_with_a_line_break(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETFOOT_API_KEY", "secret\n")
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "FLEETFOOT_API_KEY" in error and "line break" in error and "secret" not in error

"""Routes that change the engine, behind a flag and a key of their own: pause, sleep, weights, profiles, caches.

Options are in the query (``/sleep?level=1``) or in a JSON body. Responses have the engine's state afterwards.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.server.conversion import converted, decode_body
from fleetfoot.server.http import JSON, ApiError, Handler, invalid, read_body
from fleetfoot.server.openapi import Endpoint
from fleetfoot.server.service import Service


class NoOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a route, with the engine's defaults."""


_O = TypeVar("_O", bound=NoOptions)


class Sleep(NoOptions):
    level: int = 1
    mode: str = "abort"


class WakeUp(NoOptions):
    tags: list[str] | None = None


class Pause(NoOptions):
    mode: str = "abort"
    wait_for_inflight_requests: bool = False
    clear_cache: bool = True


class ResetPrefixCache(NoOptions):
    reset_running_requests: bool = False
    reset_connector: bool = False
    reset_external: bool = False
    """vLLM's name of ``reset_connector``."""


class AbortRequests(NoOptions):
    request_ids: list[str]


class InitWeightTransfer(NoOptions):
    init_info: dict[str, Any] | None = None


class StartWeightUpdate(NoOptions):
    mode: str = "drain"
    is_checkpoint_format: bool = True


class UpdateWeights(NoOptions):
    """One of the first three has the weights."""

    update_info: dict[str, Any] | None = None
    """From a trainer."""
    weights_path: str | None = None
    """A folder or a hub id."""
    patches: list[dict[str, Any]] | None = None
    mode: str = "drain"
    check_finite: bool | None = None
    weight_version: int | None = None


class UpdateConfig(NoOptions):
    overrides: dict[str, Any]
    mode: str = "keep"


class WeightChecksums(NoOptions):
    names: list[str] | None = None


class StartProfile(NoOptions):
    profile_prefix: str | None = None


class CollectiveRpc(NoOptions):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None
    """Has no effect."""


_WEIGHT_METHODS = {
    "update_info": "update_weights",
    "weights_path": "reload_weights",
    "patches": "apply_sparse_weight_patches",
}


class AdminState(msgspec.Struct):
    """The engine after the call, and results of the call."""

    status: str
    is_paused: bool
    is_sleeping: bool
    weight_version: int
    request_ids: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The ids of the requests that were aborted."""
    checksums: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """By the name of the tensor."""
    files: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The files of the profiles of all ranks."""
    results: list[Any] | msgspec.UnsetType = msgspec.UNSET
    """The results of all ranks."""


def admin_endpoints(service: Service) -> list[Endpoint]:
    """The table of these endpoints."""
    routes = _Routes(service)
    checksums = routes.calling("weight_checksums", WeightChecksums, "checksums")
    connect = routes.calling("init_weight_transfer", InitWeightTransfer)
    posts: list[tuple[str, type[NoOptions], Handler, str]] = [
        ("/sleep", Sleep, routes.calling("sleep", Sleep), "Give the memory of weights and KV back."),
        ("/wake_up", WakeUp, routes.calling("wake_up", WakeUp), "Take the memory again."),
        ("/pause", Pause, routes.calling("pause_generation", Pause), "Compute no requests."),
        ("/resume", NoOptions, routes.calling("resume_generation", NoOptions), "Compute requests again."),
        ("/reset_prefix_cache", ResetPrefixCache, routes.reset_prefix_cache, "Forget cached prefixes."),
        (
            *("/abort_requests", AbortRequests),
            *(routes.calling("abort_requests", AbortRequests, "request_ids"), "End requests."),
        ),
        ("/init_weight_transfer", InitWeightTransfer, connect, "Connect the workers with a trainer."),
        ("/init_weight_transfer_engine", InitWeightTransfer, connect, "The same, by vLLM's name."),
        (
            *("/start_weight_update", StartWeightUpdate),
            *(routes.calling("start_weight_update", StartWeightUpdate), "Begin several updates of one version."),
        ),
        ("/update_weights", UpdateWeights, routes.update_weights, "Replace weights."),
        (
            *("/finish_weight_update", NoOptions),
            *(routes.calling("finish_weight_update", NoOptions), "End several updates of one version."),
        ),
        ("/update_config", UpdateConfig, routes.calling("update_config", UpdateConfig), "Change settings."),
        ("/weight_checksums", WeightChecksums, checksums, "Checksums of tensors."),
        ("/start_profile", StartProfile, routes.calling("start_profile", StartProfile), "Begin a trace of each rank."),
        ("/stop_profile", NoOptions, routes.calling("stop_profile", NoOptions, "files"), "Write the traces."),
        ("/collective_rpc", CollectiveRpc, routes.collective_rpc, "Call a method of the workers."),
    ]
    gets = [
        ("/is_sleeping", routes.state, "Whether the engine sleeps."),
        ("/is_paused", routes.state, "Whether the engine is paused."),
        ("/weight_version", routes.state, "The version of the weights."),
    ]
    endpoints = [
        Endpoint(
            *("POST", path, handler, summary),
            request=kind,
            is_body_optional=True,
            response=AdminState,
            errors=(400, 409, 413, 415, 503),
            is_admin=True,
        )
        for path, kind, handler, summary in posts
    ]
    endpoints += [
        Endpoint("GET", path, handler, summary, response=AdminState, errors=(503,), is_admin=True)
        for path, handler, summary in gets
    ]
    return endpoints


class _Routes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def state(self, http: Request) -> Response:
        return await self._respond()

    async def reset_prefix_cache(self, http: Request) -> Response:
        options = await self._read(http, ResetPrefixCache)
        resets_connector = options.reset_connector or options.reset_external
        running = options.reset_running_requests
        await self._run("reset_prefix_cache", reset_running_requests=running, reset_connector=resets_connector)
        return await self._respond()

    async def update_weights(self, http: Request) -> Response:
        options = msgspec.structs.asdict(await self._read(http, UpdateWeights))
        sources = {name: options.pop(name) for name in _WEIGHT_METHODS}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise invalid("update_info", f"give one of {', '.join(sources)}; {len(given)} were given")
        await self._run(_WEIGHT_METHODS[given[0]], sources[given[0]], **options)
        return await self._respond()

    async def collective_rpc(self, http: Request) -> Response:
        options = await self._read(http, CollectiveRpc)
        call = {"method": options.method, "args": options.args, "kwargs": options.kwargs}
        results = await self._run("collective_rpc", **call)
        return await self._respond(results=results)

    def calling(self, method: str, kind: type[NoOptions], result: str | None = None) -> Handler:
        """A handler that calls a method of the engine with the options. ``result``: the field of the response that has
        the method's result."""

        async def handle(http: Request) -> Response:
            value = await self._run(method, **msgspec.structs.asdict(await self._read(http, kind)))
            return await self._respond(**({} if result is None else {result: value}))

        return handle

    async def _run(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        """Raises ApiError: 400 for invalid options, and 409 for what the engine cannot do in its present state."""
        try:
            return await self._service.engine.call(name, *arguments, **options)
        except (ValueError, TypeError) as error:
            refusal = ApiError.of(error)
            if refusal.param not in options:
                refusal.param = None  # the message begins with something else
            raise refusal from error
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise ApiError(409, str(error), "conflict") from error

    async def _respond(self, **results: Any) -> Response:
        return JSON(AdminState("ok", **await self._service.engine.call("state"), **results))

    async def _read(self, http: Request, kind: type[_O]) -> _O:
        """Options of the query and the body, as one object."""
        given: dict[str, Any] = {}
        for field in msgspec.structs.fields(kind):
            values = http.query_params.getlist(field.name)
            if values:
                given[field.name] = values if "list" in str(field.type) else values[-1]
        for name in http.query_params:
            given.setdefault(name, None)  # is refused by its name
        has_body = http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers
        if has_body and (body := await read_body(http, self._service.settings.max_body_bytes)):
            given |= decode_body(body, msgspec.json.Decoder(dict[str, Any]))
        return converted(given, kind, strict=False)

"""Routes that change the engine, behind a flag and a key of their own: pause, sleep, weights, profiles, caches.

Options are in the query (``/sleep?level=1``) or in a JSON body. Responses have the engine's state afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar, cast, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.engine.calls import RPC_METHODS, WORKER_CALLS, EngineCalls
from fleetfoot.server.conversion import converted, decode_body
from fleetfoot.server.http import JSON, ApiError, Handler, invalid, read_body
from fleetfoot.server.openapi import Endpoint
from fleetfoot.server.service import Service
from fleetfoot.utils.validation import FieldError, shown


class NoOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a route, with the engine's defaults."""


_O = TypeVar("_O", bound=NoOptions)

_OBJECT = dict[str, Any]
_BODY_TYPES: dict[str, Any] = {
    "method": str, "args": list[Any], "kwargs": _OBJECT | None, "init_info": _OBJECT | None, "update_info": _OBJECT,
    "patches": list[_OBJECT], "weights": str | None, "weights_path": str | None, "weights_iterator": None,
}  # fmt: skip
"""Types of parameters whose methods take what no body can hold."""


def options_of(call: Callable[..., Any]) -> type[NoOptions]:
    """The parameters of a method of `EngineCalls` as options of a route."""
    hints, fields = get_type_hints(call) | _BODY_TYPES, list[Any]()
    for name, parameter in list(signature(call).parameters.items())[1:]:
        has_default = parameter.default is not parameter.empty
        fields.append((name, hints[name], parameter.default) if has_default else (name, hints[name]))
    title = call.__name__.title().replace("_", "")
    return cast("type[NoOptions]", msgspec.defstruct(title, fields, bases=(NoOptions,), kw_only=True))


class ResetPrefixCache(NoOptions):
    reset_running_requests: bool = False
    reset_connector: bool = False
    reset_external: bool = False
    """vLLM's name of ``reset_connector``."""


class AbortRequests(NoOptions):
    request_ids: list[str]


class UpdateWeights(NoOptions):
    """One of the first three has the weights, and names the call."""

    update_info: dict[str, Any] | None = None
    """From a trainer."""
    weights_path: str | None = None
    """A folder or a hub id."""
    patches: list[dict[str, Any]] | None = None
    mode: str = "drain"
    check_finite: bool | None = None
    weight_version: int | None = None


_WEIGHT_CALLS = {
    "update_info": "update_weights",
    "weights_path": "reload_weights",
    "patches": "apply_sparse_weight_patches",
}
_CONNECT = options_of(EngineCalls.init_weight_transfer_engine)
_RPC = options_of(EngineCalls.collective_rpc)
_ROUTES: list[tuple[str, str, type[NoOptions], str, str]] = [
    ("/sleep", "sleep", options_of(EngineCalls.sleep), "", "Give the memory of weights and KV back."),
    ("/wake_up", "wake_up", options_of(EngineCalls.wake_up), "", "Take the memory again."),
    ("/pause", "pause_generation", options_of(EngineCalls.pause_generation), "", "Compute no requests."),
    ("/resume", "resume_generation", NoOptions, "", "Compute requests again."),
    ("/reset_prefix_cache", "reset_prefix_cache", ResetPrefixCache, "", "Forget cached prefixes."),
    ("/abort_requests", "abort_requests", AbortRequests, "request_ids", "End requests."),
    ("/init_weight_transfer", "init_weight_transfer", _CONNECT, "", "Connect the workers with a trainer."),
    ("/init_weight_transfer_engine", "init_weight_transfer", _CONNECT, "", "The same, by vLLM's name."),
    (
        *("/start_weight_update", "start_weight_update", options_of(EngineCalls.start_weight_update)),
        *("", "Begin several updates of one version."),
    ),
    ("/update_weights", "update_weights", UpdateWeights, "", "Replace weights."),
    ("/finish_weight_update", "finish_weight_update", NoOptions, "", "End several updates of one version."),
    ("/update_config", "update_config", options_of(EngineCalls.update_config), "", "Change settings."),
    (
        *("/weight_checksums", "weight_checksums", options_of(EngineCalls.weight_checksums)),
        *("checksums", "Checksums of tensors."),
    ),
    ("/start_profile", "start_profile", options_of(EngineCalls.start_profile), "", "Begin a trace of each rank."),
    ("/stop_profile", "stop_profile", NoOptions, "files", "Write the traces."),
    ("/collective_rpc", "collective_rpc", _RPC, "results", "Call a method of the workers."),
]
"""Path, the call of the engine, options, the field of the response that has its result, and what it does."""


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
    gets = {
        "/is_sleeping": "Whether the engine sleeps.",
        "/is_paused": "Whether the engine is paused.",
        "/weight_version": "The version of the weights.",
    }
    endpoints = [
        Endpoint(
            *("POST", path, routes.calling(name, options, result), summary),
            request=options,
            is_body_optional=True,
            response=AdminState,
            errors=(400, 409, 413, 415, 503),
            is_admin=True,
        )
        for path, name, options, result, summary in _ROUTES
    ]
    endpoints += [
        Endpoint("GET", path, routes.state, summary, response=AdminState, errors=(503,), is_admin=True)
        for path, summary in gets.items()
    ]
    return endpoints


class _Routes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def state(self, http: Request) -> Response:
        return await self._respond()

    def calling(self, method: str, kind: type[NoOptions], result: str) -> Handler:
        """A handler that calls the engine with the options. ``result``: the field of the response with what it returns;
        empty: none."""

        async def handle(http: Request) -> Response:
            options = await self._read(http, kind)
            given = msgspec.structs.asdict(options)
            if isinstance(options, UpdateWeights):
                value = await self._update_weights(given)
            else:
                if isinstance(options, ResetPrefixCache):
                    given["reset_connector"] |= given.pop("reset_external")
                if isinstance(options, _RPC):
                    given |= _rpc_arguments(given["method"], given["args"], given["kwargs"] or {})
                value = await self._run(method, **given)
            return await self._respond(**({result: value} if result else {}))

        return handle

    async def _update_weights(self, options: dict[str, Any]) -> Any:
        sources = {name: options.pop(name) for name in _WEIGHT_CALLS}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise invalid("update_info", f"give one of {', '.join(sources)}; {len(given)} were given")
        return await self._run(_WEIGHT_CALLS[given[0]], **{given[0]: sources[given[0]]}, **options)

    async def _run(self, name: str, /, **options: Any) -> Any:
        """Raises ApiError: 400 for invalid options, and 409 for what the engine cannot do in its present state."""
        try:
            return await self._service.engine.call(name, **options)
        except (ValueError, TypeError) as error:
            if isinstance(error, FieldError) and name == "update_config" and error.field not in options:
                error = error.at(f"overrides.{error.field}")
            refusal = ApiError.of(error)
            if (refusal.param or "").partition(".")[0].partition("[")[0] not in options:
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
                given[field.name] = values if _takes_several(field.type) else values[-1]
        for name in http.query_params:
            given.setdefault(name, None)  # is refused by its name
        has_body = http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers
        if has_body and (body := await read_body(http, self._service.settings.max_body_bytes)):
            given |= decode_body(body, msgspec.json.Decoder(dict[str, Any]))
        return converted(given, kind, strict=False)


def _rpc_arguments(method: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method that is called on all workers, by name. Raises ApiError 400."""
    if method not in RPC_METHODS:
        raise invalid("method", f"method is {shown(method)}; it can be {', '.join(RPC_METHODS)}")
    if method in WORKER_CALLS:
        kind, names = NoOptions, list[str]()
    else:
        parameters = list(signature(call := getattr(EngineCalls, method)).parameters.values())[1:]
        kind, names = options_of(call), [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    if len(args) > len(names):
        raise invalid("args", f"args has {len(args)} entries; {method} takes {', '.join(names) or 'none'}")
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise invalid(f"kwargs.{min(twice)}", f"kwargs.{min(twice)} is in args, too")
    return {"args": [], "kwargs": msgspec.structs.asdict(converted(given | kwargs, kind, place="kwargs"))}


def _takes_several(kind: Any) -> bool:
    info = msgspec.inspect.type_info(kind)
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return any(isinstance(one, msgspec.inspect.CollectionType) for one in kinds)

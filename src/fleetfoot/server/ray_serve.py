"""Fleetfoot as a deployment of Ray Serve, with Serve's replicas and autoscaling: `FleetfootServer`.

A replica has an engine's process, as `fleetfoot serve` has, and answers requests with the server's application, without
a socket. Serve calls it over its HTTP proxy (``__serve_build_asgi_app__``), or by the methods of Ray's LLM servers
(``LLMConfig.server_cls``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.config.engine import EngineConfig
from fleetfoot.server.api_server import connected
from fleetfoot.server.app import make_app
from fleetfoot.server.own_engine import OwnEngineProcess
from fleetfoot.server.service import Service, ServiceSettings
from fleetfoot.server.store import MemoryStore

_MAX_QUEUE = 4096
_MAX_BODY = 32 << 20
_STORED = 256 << 20
_SECRET = "authorization"


class FleetfootServer:
    """A replica.

    Args:
        llm_config: Ray's ``LLMConfig``. ``engine_kwargs`` are the settings of an engine; ``model_source`` of
            ``model_loading_config`` is the model, if those have none.
    """

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Serve awaits it: the model is loaded then
        self._llm_config = llm_config
        self._config = engine_config(llm_config)
        self._admin_key = secrets.token_urlsafe(32)
        self._cause = ""
        await self.start()

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """The options of ``serve.deployment``: those of ``deployment_config``, autoscaling included, and as many GPUs
        for a replica as its engine has ranks, unless Ray places these, the device is a CPU, or they are given."""
        config, options = engine_config(llm_config), dict(llm_config.deployment_config)
        actor = dict(options.get("ray_actor_options") or {})
        has_own = config.distributed_executor_backend != "ray" and config.device != "cpu"
        actor.setdefault("num_gpus", config.world_size if has_own else 0)
        return {**options, "ray_actor_options": actor}

    async def start(self) -> None:
        """Load the model, once. Raises RuntimeError: the engine has ended."""
        if hasattr(self, "_process"):
            return
        self._process = OwnEngineProcess(self._config, logging.INFO)
        self._client = connected(self._process.address)
        self._ending = asyncio.ensure_future(self._watch())
        starting = asyncio.ensure_future(self._client.start())
        await asyncio.wait((self._ending, starting), return_when=asyncio.FIRST_COMPLETED)
        await self.check_health()
        starting.result()
        settings = ServiceSettings((self._llm_config.model_id,), _MAX_QUEUE, _MAX_BODY, allow_unknown_fields=True)
        self._service = Service(self._client, settings)
        store = MemoryStore(settings.max_stored_responses, _STORED)
        self._app = make_app(self._service, store, admin_key=self._admin_key)

    async def __serve_build_asgi_app__(self) -> Any:
        """The application, for Serve's HTTP proxy."""
        return self._app

    async def _watch(self) -> None:
        self._cause = await self._process.wait(self._client)
        self._client.fail(self._cause)

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.stop()

    # --- Ray's protocol of LLM servers --------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises RuntimeError: the engine has ended, or is stuck; Serve then replaces the replica."""
        if self._cause:
            raise RuntimeError(self._cause)
        if hasattr(self, "_service") and (problem := self._service.liveness.problem):
            raise RuntimeError(problem)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """The response, or the events of a stream as texts."""
        async for item in self._answer("/v1/chat/completions", request, raw_request_info, "ChatCompletionResponse"):
            yield item

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """See `chat`."""
        async for item in self._answer("/v1/completions", request, raw_request_info, "CompletionResponse"):
            yield item

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """See `chat`."""
        async for item in self._answer("/v1/embeddings", request, raw_request_info, "EmbeddingResponse"):
            yield item

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """See `chat`."""
        async for item in self._answer("/tokenize", request, raw_request_info, "TokenizeResponse"):
            yield item

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """See `chat`."""
        async for item in self._answer("/detokenize", request, raw_request_info, "DetokenizeResponse"):
            yield item

    async def reset_prefix_cache(self) -> None:
        await self._administrate("/reset_prefix_cache")

    async def start_profile(self) -> None:
        await self._administrate("/start_profile")

    async def stop_profile(self) -> None:
        await self._administrate("/stop_profile")

    async def sleep(self, **options: Any) -> None:
        await self._administrate("/sleep", options)

    async def wakeup(self, **options: Any) -> None:
        await self._administrate("/wake_up", options)

    async def is_sleeping(self) -> bool:
        return bool((await self._administrate("/is_sleeping", method="GET"))["is_sleeping"])

    async def pause(self, **options: Any) -> None:
        await self._administrate("/pause", options)

    async def resume(self, **options: Any) -> None:
        await self._administrate("/resume", options)

    async def is_paused(self) -> bool:
        return bool((await self._administrate("/is_paused", method="GET"))["is_paused"])

    async def llm_config(self) -> Any:
        """What the replica was made from."""
        return self._llm_config

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _answer(self, path: str, request: Any, info: Any, kind: str) -> AsyncIterator[Any]:
        """The response as Ray's ``kind``, its ``ErrorResponse``, or events."""
        body = request.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        headers = {name: value for name, value in getattr(info, "headers", {}).items() if name.lower() != _SECRET}
        status, content_type, parts = await self._request("POST", path, body, headers)
        if content_type.startswith("text/event-stream"):
            async for part in parts:
                yield part.decode()
            return
        from ray.llm._internal.serve.core.configs import openai_api_models as models  # vLLM's or SGLang's, by Ray

        content = json.loads(b"".join([part async for part in parts]))
        if status == 200:
            yield getattr(models, kind)(**content)
            return
        error = content["error"]
        info = models.ErrorInfo(message=error["message"], type=error["type"], param=error.get("param"), code=status)
        yield models.ErrorResponse(error=info)

    async def _administrate(self, path: str, options: Mapping[str, Any] = {}, method: str = "POST") -> Any:
        headers = {_SECRET: f"Bearer {self._admin_key}"}
        body = dict(options) if method == "POST" else None
        status, _, parts = await self._request(method, path, body, headers)
        content = json.loads(b"".join([part async for part in parts]))
        if status != 200:
            raise RuntimeError(content["error"]["message"])
        return content

    async def _request(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> tuple[int, str, AsyncIterator[bytes]]:
        """Status, content type and the parts of the body of the application's answer."""
        content = b"" if body is None else json.dumps(body).encode()
        own = {"content-type": "application/json", "content-length": str(len(content))}
        names = {**{name.lower(): value for name, value in headers.items()}, **own}
        names.pop("transfer-encoding", None)
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in names.items()],
            "client": ("ray", 0), "server": ("ray", 0), "extensions": {},
        }  # fmt: skip
        messages: asyncio.Queue[Any] = asyncio.Queue(1)
        given = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> Any:
            if (message := next(given, None)) is None:
                await asyncio.Event().wait()  # the client stays
            return message

        running = asyncio.ensure_future(self._app(scope, receive, messages.put))
        running.add_done_callback(lambda task: task.cancelled() or task.exception())
        start = await _next(messages, running)
        found = {name.lower(): value for name, value in start["headers"]}

        async def parts() -> AsyncIterator[bytes]:
            try:
                more = True
                while more:
                    message = await _next(messages, running)
                    if message.get("body"):
                        yield message["body"]
                    more = message.get("more_body", False)
            finally:
                running.cancel()

        return start["status"], found.get(b"content-type", b"").decode(), parts()


async def _next(messages: asyncio.Queue[Any], running: asyncio.Future[None]) -> Any:
    """The next message of the application. Raises what it raises."""
    waiting = asyncio.ensure_future(messages.get())
    await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done() and messages.empty():
        waiting.cancel()
        running.result()
        raise RuntimeError("the application has ended without an answer")
    return await waiting


def engine_config(llm_config: Any) -> EngineConfig:
    """The settings of a replica's engine."""
    keywords = dict(llm_config.engine_kwargs)
    source = getattr(llm_config.model_loading_config, "model_source", None)
    if "model" not in keywords and isinstance(source, str):
        keywords["model"] = source
    return EngineConfig.from_keywords(keywords, owner="FleetfootServer")


@dataclass(frozen=True)
class ReplicaSettings:
    """What `FleetfootServer` reads of Ray's ``LLMConfig``, which only vLLM's or SGLang's installation can import."""

    model_id: str
    """The name that clients give."""
    model_source: str | None = None
    """A hub id or a folder; None: that of ``engine_kwargs``, or else the embedded model."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    deployment_config: dict[str, Any] = field(default_factory=dict)

    @property
    def model_loading_config(self) -> ReplicaSettings:
        """The object that has ``model_source``."""
        return self


def build_app(arguments: dict[str, Any]) -> Any:
    """An application of Serve, for ``import_path``. ``arguments``: the fields of `ReplicaSettings`."""
    from ray import serve

    settings = ReplicaSettings(**arguments)
    options = {"name": "fleetfoot", **FleetfootServer.get_deployment_options(settings)}
    deployment: Any = serve.deployment(serve.ingress()(FleetfootServer), **options)
    return deployment.bind(llm_config=settings)

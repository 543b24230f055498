"""`fleetfoot serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import add_engine_arguments, engine_config, json_object
from fleetfoot.cli.command import Command, UsageError, at_least, print_status, usage_errors
from fleetfoot.config import env
from fleetfoot.parsers.registry import check_parsers

if TYPE_CHECKING:
    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.server.api_server import ServerSettings
    from fleetfoot.server.app import CorsSettings
    from fleetfoot.server.bounds import BodyLimits

_EPILOG = """\
Serve the embedded model, and send it a request:

  fleetfoot serve
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "Once upon a time", "max_tokens": 40}'

SIGTERM lets unfinished requests end (--shutdown-timeout), a second one aborts them; Ctrl-C aborts them at once.
The exit code is 1 if the engine has failed. docs/serving.md describes endpoints and limits."""

_DEFAULT_QUEUE = 4096


def _add_flags(parser: argparse.ArgumentParser) -> None:
    text = "YAML file of flags, such as 'port: 8000' or 'max-model-len: 4096'; those of the command line win"
    parser.add_argument("--config", metavar="FILE", help=text)
    add_server_arguments(parser)
    text = "no server: run the workers of a machine that is not the first (--nnodes, --node-rank, --master-addr)"
    parser.add_argument("--headless", action="store_true", help=text)
    leave_out = "served_model_name", "reasoning_parser", "otlp_traces_endpoint"
    add_engine_arguments(parser, takes_model=True, takes_seed=True, leave_out=leave_out)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an HTTP server, which `server_settings` reads."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=_port, default=8000, metavar="N", help="port to listen on; 0: any free one (default: 8000)")
    add("--uds", metavar="PATH", help="listen on this Unix socket instead")
    add(
        "--api-key", action="append", metavar="KEY", help="clients must send this key; may be given several times. "
        "FLEETFOOT_API_KEY is one more",
    )  # fmt: skip
    add(
        "--enable-admin-routes",
        action="store_true",
        help="add routes that change the engine (/sleep, /pause, /update_weights, ...); they need --admin-key",
    )
    add(
        "--admin-key",
        metavar="KEY",
        help="their key, or FLEETFOOT_ADMIN_KEY; --api-key does not open them",
    )
    add("--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests (default: MODEL)")
    add("--root-path", default="", metavar="PATH", help="path of the server behind a proxy")
    add("--ssl-keyfile", metavar="FILE", help="private key, for https")
    add("--ssl-certfile", metavar="FILE", help="certificate, for https")
    add("--ssl-ca-certs", metavar="FILE", help="certificates of clients: each must have one of them")
    add(
        "--api-server-count",
        type=at_least(1),
        metavar="N",
        help="processes for HTTP, tokenizing and texts (default: one for every four cores, up to four)",
    )
    text = (
        f"unfinished requests from which on others get 429; API servers have equal shares (default: {_DEFAULT_QUEUE})"
    )
    add("--max-queue", type=at_least(1), default=_DEFAULT_QUEUE, metavar="N", help=text)
    add(
        "--max-body-bytes",
        type=at_least(1),
        default=16 << 20,
        metavar="N",
        help="largest body of a request (default: 16 MiB)",
    )
    text = "log unknown fields of requests once each and ignore them, instead of refusing the request"
    add("--allow-unknown-fields", action="store_true", help=text)
    add(
        "--limit-per-request",
        type=json_object,
        default={},
        metavar="JSON",
        help="most entries of lists and objects of a request, such as '{\"tools\": 2000}'; docs/serving.md has all",
    )
    text = "unfinished requests of one API key, or address without keys, from which on it gets 429 (default: any)"
    add("--max-queue-per-key", type=at_least(1), metavar="N", help=text)
    text = "responses that are stored for previous_response_id; the oldest ones are dropped (default: 4096)"
    add("--max-stored-responses", type=at_least(1), default=4096, metavar="N", help=text)
    add("--max-stored-mib", type=at_least(1), default=256, metavar="N", help="of all stored responses (default: 256)")
    text = "seconds that unfinished requests have after SIGTERM (default: 30)"
    add("--shutdown-timeout", type=_seconds, default=30.0, metavar="X", help=text)
    text = "send spans of requests to this collector of OpenTelemetry (the extra otel), by OTLP over HTTP"
    add("--otlp-traces-endpoint", metavar="URL", help=text)
    add("--chat-template", metavar="FILE", help="a Jinja file, or the name of one of the model's chat templates")
    text = "format of tool calls, such as hermes, llama3_json or mistral (default: that of the chat template)"
    add("--tool-call-parser", metavar="NAME", help=text)
    text = "format of reasoning, such as qwen3 or deepseek_r1 (default: that of the chat template)"
    add("--reasoning-parser", metavar="NAME", help=text)
    add("--enable-auto-tool-choice", action="store_true", help="no effect: tools are always enabled")
    text = "objects of requests' schemas have only the properties that are named, unless additionalProperties is there"
    add("--strict-schemas", action="store_true", help=text)
    add("--trust-request-chat-template", action="store_true", help="accept chat templates in requests")
    text = "accept kv_transfer_params in requests, offers of KV that a prefill engine has signed, and return them"
    add("--enable-kv-offers", action="store_true", help=text)
    add(
        "--allowed-origins",
        type=_names,
        metavar="LIST",
        help="origins of web pages that may send requests: a JSON list, or names with commas between (default: none)",
    )
    add("--allowed-methods", type=_names, default=("*",), metavar="LIST", help="their methods (default: all)")
    add("--allowed-headers", type=_names, default=("*",), metavar="LIST", help="their headers (default: all)")
    text = "names that the Host header may have on a loopback address, besides localhost, as behind a proxy; '*': any"
    add("--allowed-hosts", type=_names, default=(), metavar="LIST", help=text)
    add("--allow-credentials", action="store_true", help="they may send cookies and other credentials")
    for name in ("prompt-tokens-details", "server-load-tracking", "request-id-headers"):
        add(f"--enable-{name}", action="store_true", help=argparse.SUPPRESS)  # vLLM's: it is always so
    add("--uvicorn-log-level", metavar="LEVEL", help="no effect: --verbose logs more")
    add("--disable-uvicorn-access-log", action="store_true", help="no effect: --access-log is needed to log requests")
    add("--log-format", choices=("text", "json"), default="text", help="of the log on standard error (default: text)")
    add("--access-log", action="store_true", help="log each request")


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)  # validated before anything is started
        if arguments.headless:
            return run_workers(config)

        from fleetfoot.server.serve import default_api_servers, serve

        arguments.api_server_count = arguments.api_server_count or min(default_api_servers(), arguments.max_queue)
        return serve(config, server_settings(arguments, (config.model,), config.data_parallel_size))


def run_workers(config: EngineConfig) -> int:
    """Run the workers of a machine that is not the first, until the engine ends. Returns the exit code."""
    if config.node_rank != 0:
        node, address = f"node {config.node_rank} of {config.nnodes}", f"{config.master_addr}:{config.master_port}"
        print_status(f"this is {node}, and waits for node 0 at {address}")

    from fleetfoot.executor.nodes import run_node

    run_node(config)
    return 0


def server_settings(
    arguments: argparse.Namespace, default_names: tuple[str, ...] = (), data_parallel_size: int = 1
) -> ServerSettings:
    """The settings of an HTTP server. ``default_names``: of the model; (): the name that its engine has.

    Raises UsageError: a key or a file cannot be used.
    """
    from fleetfoot.server.api_server import ServerSettings
    from fleetfoot.server.service import ServiceSettings

    keys = [*(arguments.api_key or ()), *([key] if (key := env.api_key()) else [])]
    _check_keys("--api-key", arguments.api_key or ())
    _check_keys("FLEETFOOT_API_KEY (or VLLM_API_KEY)", keys[len(arguments.api_key or ()) :])
    check_parsers(arguments.tool_call_parser, arguments.reasoning_parser)
    if "" in (names := arguments.served_model_name or ()):
        raise UsageError(f"--served-model-name is {names!r}; each name must have at least one character")
    service = ServiceSettings(
        model_names=tuple(arguments.served_model_name or default_names),
        max_queue=-(-arguments.max_queue // (arguments.api_server_count or 1)),
        max_body_bytes=arguments.max_body_bytes,
        limits=_limits(arguments.limit_per_request),
        max_queue_per_key=arguments.max_queue_per_key,
        chat_template=_chat_template(arguments.chat_template),
        allow_unknown_fields=arguments.allow_unknown_fields,
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        trusts_chat_templates=arguments.trust_request_chat_template,
        data_parallel_size=data_parallel_size,
        strict_schemas=arguments.strict_schemas,
        accepts_kv_offers=arguments.enable_kv_offers,
        max_stored_responses=arguments.max_stored_responses,
        max_stored_bytes=arguments.max_stored_mib << 20,
        otlp_traces_endpoint=arguments.otlp_traces_endpoint,
    )
    return ServerSettings(
        service,
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        api_keys=tuple(keys),
        admin_key=_admin_key(arguments, keys),
        root_path=arguments.root_path.rstrip("/"),
        ssl_keyfile=arguments.ssl_keyfile,
        ssl_certfile=arguments.ssl_certfile,
        ssl_ca_certs=arguments.ssl_ca_certs,
        api_server_count=arguments.api_server_count or 1,
        shutdown_timeout=arguments.shutdown_timeout,
        log_level=logging.DEBUG if arguments.verbose else logging.INFO,
        log_format=arguments.log_format,
        access_log=arguments.access_log,
        cors=_cors(arguments),
        allowed_hosts=arguments.allowed_hosts,
    )


def _check_keys(place: str, keys: Sequence[str]) -> None:
    if any(key.endswith("\n") for key in keys):
        raise UsageError(f"{place} ends with a line break, which no client can send; write the key without it")
    if not all(keys) or not all(key.isascii() and key.isprintable() for key in keys):
        raise UsageError(f"{place} must hold printable ASCII characters, and not be empty")


def _admin_key(arguments: argparse.Namespace, api_keys: list[str]) -> str | None:
    """The key of the routes that change the engine; None: they are not enabled."""
    if not arguments.enable_admin_routes:
        if arguments.admin_key is not None:
            raise UsageError("--admin-key has no effect without --enable-admin-routes")
        return None
    key = env.admin_key() if arguments.admin_key is None else str(arguments.admin_key)
    if key is None:
        raise UsageError("--enable-admin-routes needs a key: set --admin-key KEY or FLEETFOOT_ADMIN_KEY")
    _check_keys("--admin-key" if arguments.admin_key is not None else "FLEETFOOT_ADMIN_KEY", [key])
    if key in api_keys:
        raise UsageError("--admin-key is one of the keys of --api-key; choose another one")
    return key


def _cors(arguments: argparse.Namespace) -> CorsSettings | None:
    from fleetfoot.server.app import CorsSettings

    methods, headers, credentials = arguments.allowed_methods, arguments.allowed_headers, arguments.allow_credentials
    if arguments.allowed_origins is None:
        if methods != ("*",) or headers != ("*",) or credentials:
            raise UsageError("--allowed-methods, --allowed-headers and --allow-credentials need --allowed-origins")
        return None
    return CorsSettings(arguments.allowed_origins, methods, headers, credentials)


def _names(text: str) -> tuple[str, ...]:
    """A JSON list of strings, as vLLM's, or names with commas between."""
    names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.split(",")]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise argparse.ArgumentTypeError(f"{text} is no list of names")
    return tuple(names)


def _chat_template(given: str | None) -> str | None:
    """The content of a file, Jinja source, or the name of a template, which the server compares with the model's."""
    if given is None:
        return None
    if "{" in given:
        return _checked_template("its value", given)
    if not (Path(given).is_file() or Path(given).suffix or os.sep in given):
        return given
    try:
        source = Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {given}: {error}") from error
    if "{" not in source:
        raise UsageError(f"--chat-template {given}: the file has no Jinja, such as {{{{ messages }}}}, in it")
    return _checked_template(given, source)


def _checked_template(place: str, source: str) -> str:
    """The source, if it is valid Jinja: otherwise the first chat would find out."""
    from fleetfoot.tokenizer.chat_template import ChatTemplate

    try:
        ChatTemplate(source)
    except ValueError as error:
        raise UsageError(f"--chat-template, {place}: {error}") from error
    return source


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; it must be an integer in [0, 65535]")
    return int(text)


def _limits(given: dict[str, Any]) -> BodyLimits:
    """Raises UsageError for an unknown limit, or one that is no count."""
    from fleetfoot.server.bounds import BodyLimits

    known = [one.name for one in dataclasses.fields(BodyLimits)]
    for name, most in given.items():
        if name not in known:
            raise UsageError(f"--limit-per-request has {name!r}, which is not a limit; it can have {', '.join(known)}")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise UsageError(f"--limit-per-request has {name}={most!r}; it must be an integer of at least 1")
    return BodyLimits(**given)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


_HELP = "serve a model over HTTP, with OpenAI's API"

COMMAND = Command("serve", _HELP, _add_flags, _run, _EPILOG, "[MODEL] ")

"""Calls of an engine by clients in other processes. Those that change the engine run between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fleetfoot.engine.calls import CALLS, RPC_METHODS, prepared
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.output_router import EngineGauges
from fleetfoot.engine.wire import Call, EngineState, Failed, Reply
from fleetfoot.records.weights import WeightError
from fleetfoot.utils.validation import FieldError

Send = Callable[[Reply], object]
"""Sends the reply to the client."""


class RemoteCalls:
    """The methods.

    Args:
        announce: called when facts of the engine may have changed that clients read.
    """

    def __init__(self, engine: LLMEngine, announce: Callable[[], object]) -> None:
        self._engine = engine
        self._announce = announce
        self._drains: list[tuple[Call, Send]] = []

    def run(self, call: Call, send: Send) -> None:
        """Run a call of `CALLS`, and send its reply now or later. Exceptions of the method are sent."""
        if call.method == "drain":
            self._drains.append((call, send))
            return
        try:
            if CALLS[call.method].runs == "held":
                function, mode = self._held(call)
                done: Callable[[Any], object] = lambda hold: self._finish(call, hold.result, send)  # noqa: E731
                self._engine.hold(lambda: function(self._engine), mode, on_done=done)
                return
            owner: Any = self if hasattr(self, call.method) else self._engine
            value = getattr(owner, call.method)(*call.arguments, **call.keywords)
        except (ValueError, TypeError, RuntimeError) as error:
            send(Reply(call.number, error=Failed.of(error)))
        else:
            self._finish(call, lambda: value, send)

    def _held(self, call: Call) -> tuple[Callable[[Any], Any], str]:
        """What the loop is held for, and the mode."""
        if call.method == "bring_to":
            wanted = msgspec.convert(call.arguments[0], EngineState)
            return lambda engine: bring_to(engine, wanted), "drain"
        if call.method == "collective_rpc":
            name = call.keywords["method"] if "method" in call.keywords else call.arguments[0]
            if name not in RPC_METHODS:
                raise FieldError("method", f"is {name!r}; it can be {', '.join(RPC_METHODS)}", name)
        function, mode = prepared(self._engine.suspension, call.method, call.arguments, call.keywords)
        return function, mode

    def _finish(self, call: Call, result: Callable[[], Any], send: Send) -> None:
        try:
            value = msgspec.to_builtins(result(), enc_hook=str)
        except Exception as error:
            send(Reply(call.number, error=Failed.of(error)))
            return
        if CALLS[call.method].runs != "at once":
            self._announce()
        send(Reply(call.number, value))

    def finish_drains(self) -> None:
        """Reply to calls of ``drain`` if no request is unfinished and no KV is held for a transfer: with the
        statistics, or an error if the engine's integrity check fails."""
        if not self._drains or self._engine.has_unfinished_requests():
            return
        transfers = self._engine.stats().transfers
        if transfers.num_loading or transfers.num_held_blocks:
            return
        drains, self._drains = self._drains, []
        for call, send in drains:
            self._finish(call, self._checked_stats, send)

    def _checked_stats(self) -> Any:
        self._engine.check_integrity()
        return self._engine.stats()

    def metrics(self) -> dict[str, Any]:
        """See `fleetfoot.engine.output_router.OutputRouter.metrics`."""
        engine = self._engine
        router: Any = engine.output_processor
        found: dict[str, Any] = router.metrics(engine.core.scheduler.stats(), EngineGauges.of(engine))
        return found

    def watch(self, viewer: str) -> dict[str, Any]:
        """What the engine has done since the viewer's last look; see `Watch.look`."""
        return self._engine.watching.look(viewer) | {"latencies": self._engine.output_processor.latencies()}

    def ping(self) -> None:
        """The loop is running."""

    def state(self) -> dict[str, Any]:
        """Whether the engine is paused or asleep, and the version of its weights."""
        engine = self._engine
        return {
            "is_paused": engine.is_paused,
            "is_sleeping": engine.is_sleeping(),
            "weight_version": engine.weight_version,
        }

    def abort_requests(self, request_ids: list[str]) -> list[str]:
        """End requests, and those of single prompts of a request (``ID-0``, ``ID-1``, ...); API servers put ``.`` and
        something random after ids. Returns those of ``request_ids`` that were found. KV that is held of ended requests
        with these ids is released."""
        wanted = set(request_ids)
        found: dict[str, str] = {}
        for name in self._engine.output_processor.request_ids:
            stem = name.rpartition(".")[0]
            if given := wanted.intersection((name, stem, stem.rpartition("-")[0])):
                found[name] = given.pop()
        self._engine.abort_request([*found, *wanted.difference(found)])
        return [given for given in request_ids if given in found.values()]


def state_of(engine: LLMEngine) -> EngineState:
    """What calls have made of the engine."""
    live, suspension = engine.live, engine.suspension
    return EngineState(
        weight_version=live.version,
        weights=live.source,
        has_own_weights=live.has_own_weights,
        settings=dict(live.settings),
        is_paused=suspension.is_paused,
        asleep=suspension.asleep,
        sleep_level=suspension.level,
    )


def bring_to(engine: LLMEngine, state: EngineState) -> None:
    """Give an engine that was started again the state of another one; in the function of a hold. Does nothing to an
    engine that has been brought to it, so several clients may ask for the same.

    Raises:
        WeightError: the weights are nowhere, or do not fit.
        ValueError: the settings do not fit.
    """
    before, suspension = state_of(engine), engine.suspension
    if before.weight_version < state.weight_version:
        if state.has_own_weights:
            raise WeightError(
                f"the weights of version {state.weight_version} were given as tensors or patches, and ended with the "
                "process that had them; give all tensors again, or start with them"
            )
        engine.live.reload(state.weights, check_finite=None, version=state.weight_version)
    if state.weight_version < before.weight_version:
        return  # an update has come since
    if state.settings != before.settings:
        engine.update_settings(state.settings)
    if state.is_paused and not before.is_paused:
        suspension.pause(clear_cache=False)
    elif before.is_paused and not state.is_paused:
        suspension.resume()
    if state.asleep and not suspension.asleep:
        suspension.sleep(state.sleep_level if "weights" in state.asleep else 1)
    if awake := [tag for tag in suspension.asleep if tag not in state.asleep]:
        suspension.wake_up(awake)

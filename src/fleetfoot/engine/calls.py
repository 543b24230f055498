"""The calls that administrate an engine: pause, sleep, weights, settings, caches, profiles, workers.

Each is a method of `EngineCalls`, which `fleetfoot.LLM`, `fleetfoot.AsyncLLM` and `LLMEngine` have, and a row of
`CALLS`, by which clients in other processes call it, a group of engines shares it out, and the server has a route.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fleetfoot.utils.validation import FieldError

_MODES = {"abort": "abort", "wait": "drain", "keep": "keep"}
"""vLLM's modes of a pause, and those of a `Hold`."""


def _hold_mode(mode: str) -> str:
    if mode not in _MODES:
        raise FieldError("mode", f"is {mode!r}; it can be {', '.join(_MODES)}", mode)
    return _MODES[mode]


class EngineCalls:
    """The methods. `LLM` and `LLMEngine` return results, `AsyncLLM` coroutines.

    ``mode`` of calls that change weights is what unfinished requests do, see `HoldMode`: ``drain`` (they finish with
    the old weights), ``wait``, ``keep`` or ``abort``. The prefix cache and KV connectors use no KV of earlier weights.
    Outputs have the ``weight_version`` of their tokens.
    """

    suspension: Any
    """The engine's `fleetfoot.engine.sleep.Suspension`."""

    def _held(self, function: Callable[[Any], Any], mode: str) -> Any:
        """Call ``function(engine)`` while the loop of the `LLMEngine` is held."""
        raise NotImplementedError

    # --- requests, memory, profiles, workers --------------------------------------------------------------------------

    def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> Any:
        """Compute no requests until `resume_generation`. Requests that are added to an `AsyncLLM` or `LLMEngine` wait;
        a new call of `LLM.generate` raises RuntimeError.

        Args:
            mode: of running requests: ``abort`` ends them with the tokens that they have; ``wait`` waits until they
                have ended, and keeps new ones waiting; ``keep`` stops them, and they go on later.
            wait_for_inflight_requests: vLLM's older name of ``mode="wait"``.
            clear_cache: drop cached prefixes; KV of stopped requests is computed again.

        Raises:
            ValueError: the mode is unknown.
        """
        mode = _hold_mode("wait" if wait_for_inflight_requests else mode)
        return self._held(lambda engine: engine.suspension.pause(clear_cache=clear_cache), mode)

    def resume_generation(self) -> Any:
        """Undo `pause_generation`; does nothing otherwise. An engine that sleeps stays asleep."""
        return self._held(lambda engine: engine.suspension.resume(), "keep")

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        """Give the memory of weights and KV back, until `wake_up`. Requests are as in `pause_generation`.

        Cached prefixes are forgotten. KV connectors first finish their transfers, and keep what they have saved.
        Captured graphs stay valid.

        Args:
            level: 1 keeps the weights in host memory, pinned with a GPU; 2 drops them.
            mode: of running requests, as of `pause_generation`.

        Raises:
            ValueError: the level or the mode is unknown, or the engine was started without ``enable_sleep_mode``.
            MemoryError: the host has no memory for the weights; the engine is awake.
        """
        self.suspension.check_sleep(level)
        return self._held(lambda engine: engine.suspension.sleep(level), _hold_mode(mode))

    def wake_up(self, tags: Collection[str] | None = None) -> Any:
        """Take the memory of ``tags`` again, a list of ``weights`` and ``kv_cache``; None: of both.

        With both awake, requests go on. Weights that level 2 has dropped, and that no update has replaced since, are
        then read again from where they came.

        Raises:
            ValueError: a tag is unknown.
            torch.OutOfMemoryError: the GPU has no memory for it; the engine sleeps on, and can be woken later.
            WeightError: dropped weights came from memory; give them to `reload_weights`, and call this again.
        """
        return self._held(lambda engine: engine.suspension.wake_up(tags), "keep")

    def start_profile(self, profile_prefix: str | None = None) -> Any:
        """Begin a trace: of the engine's steps, or of what each rank computes, as ``profiler_config`` says.
        ``profile_prefix``: before the names of the files.

        Raises:
            ValueError: the engine was started without a ``profiler_config``.
            RuntimeError: a trace has begun already.
        """
        return self._held(lambda engine: engine.profiler.start(profile_prefix), "keep")

    def stop_profile(self) -> Any:
        """Write the traces. Returns the file of each trace, Chrome's JSON, which https://ui.perfetto.dev opens. Raises
        RuntimeError: `start_profile` was not called."""
        return self._held(lambda engine: engine.profiler.stop(), "keep")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> Any:
        """Forget cached prefixes. Returns True, as in vLLM.

        Args:
            reset_running_requests: KV of running requests too, which is computed again.
            reset_connector: what a KV connector has saved, too.
        """
        options = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}

        def reset(engine: Any) -> bool:
            engine.core.scheduler.reset_prefix_cache(**options)
            return True

        return self._held(reset, "keep")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of the worker, or its method of this name, on every rank between steps; running requests are
        kept. ``timeout`` has no effect.

        Calls of the table that change weights or memory (``reload_weights``, ``sleep``, ...) can be called here too,
        with their mode: once for the engine, whose result stands for each rank's.

        Returns the ranks' results in their order; raises what the first of them raises, and ValueError: workers have no
        such method, or run in other processes, to which the call cannot be sent.
        """
        positional, keywords = tuple(args), dict(kwargs or {})
        if isinstance(method, str) and (call := CALLS.get(method)) is not None and call.is_for_all_ranks:
            function, mode = prepared(self.suspension, method, positional, keywords)
            return self._held(lambda engine: [function(engine)] * engine.plan.config.world_size, mode)
        return self._held(lambda engine: engine.core.executor.collective_rpc(method, positional, keywords), "keep")

    # --- weights and settings -----------------------------------------------------------------------------------------

    def reload_weights(
        self,
        weights: Any = None,
        *,
        mode: str = "drain",
        check_finite: bool | None = None,
        weight_version: int | None = None,
        weights_path: Any = None,
        weights_iterator: Any = None,
        is_checkpoint_format: bool = True,
    ) -> Any:
        """Replace weights in place: memory, captured graphs and all settings stay.

        Args:
            weights: a folder or hub id, with all tensors of the model; or pairs of a checkpoint's name and its whole
                tensor (an iterator, or a dictionary), of some tensors or of all; None: the engine's own ``model``. A
                drafter's tensors have ``drafter.`` before their names.
            check_finite: refuse values that are NaN or infinite in the dtype in which they are stored; None: as in
                ``weight_transfer_config``.
            weight_version: of the new weights, above the current one; None: the next number.
            weights_path, weights_iterator, is_checkpoint_format: vLLM's names for ``weights``.

        Returns:
            The new version.

        Raises:
            WeightError: a name, shape, dtype or value does not fit; nothing has changed on any rank.
            ValueError, TypeError: an argument is refused; nothing has changed.
            EngineDeadError: writing has failed on a rank; the engine has ended.
        """
        given = [value for value in (weights, weights_path, weights_iterator) if value is not None]
        if len(given) > 1 or not is_checkpoint_format:
            raise ValueError("give weights once, in the form of the checkpoint (is_checkpoint_format=True)")
        options = {"check_finite": check_finite, "version": weight_version}
        return self._held(lambda engine: engine.live.reload(given[0] if given else None, **options), mode)

    def apply_sparse_weight_patches(
        self, patches: Any, *, mode: str = "drain", check_finite: bool | None = None, weight_version: int | None = None
    ) -> Any:
        """Set single elements of tensors, all or none.

        Args:
            patches: dictionaries with ``name`` of a tensor in the checkpoint, ``indices`` ``[n]`` into it as a flat
                tensor, their new ``values`` ``[n]``, and the tensor's ``shape``, which may be left out; or
                `SparseWeightPatch`.
            check_finite, weight_version: as of `reload_weights`, which also lists what is returned and raised.
        """
        options = {"check_finite": check_finite, "version": weight_version}
        return self._held(lambda engine: engine.live.patch(patches, **options), mode)

    def update_config(self, overrides: Mapping[str, Any], *, mode: str = "keep") -> Any:
        """Change settings that can change in a running engine: ``load_format`` and ``model``, which the next
        `reload_weights` reads, ``max_num_batched_tokens``, up to that of the start, ``max_logprobs`` and
        ``override_generation_config``. They may be in vLLM's groups: ``{"load_config": {"load_format": ...}}``.

        Raises:
            ValueError: another setting, or an invalid value; nothing has changed.
        """
        return self._held(lambda engine: engine.update_settings(overrides), mode)

    def weight_checksums(self, names: Collection[str] | None = None) -> Any:
        """Name of a checkpoint's tensor -> 16 hex digits over its values, for ``names`` or all tensors. They depend on
        neither ranks, dtype nor storage; `fleetfoot.weights.checksums.tensor_checksum` computes them elsewhere.

        Raises:
            WeightError: there is no tensor of such a name.
            RuntimeError: ranks hold different values.
        """
        return self._held(lambda engine: engine.live.checksums(names), "keep")

    def weights_identity(self) -> Any:
        """32 hex digits over every byte of the weights in use. They are equal for copies of a checkpoint, wherever
        these are, and for the same updates of it, however these came. The first call after a start may read all files;
        after updates with tensors or patches, it reads these tensors.

        Raises:
            WeightError: a file has changed since it was loaded.
            RuntimeError: the weights sleep, and were updated.
        """
        return self._held(lambda engine: engine.live.identity(), "keep")

    def init_weight_transfer_engine(self, init_info: Any = None) -> Any:
        """Connect the workers with a trainer, which calls `NCCLWeightTransferEngine.trainer_init` meanwhile (between
        CPUs that of `GlooWeightTransferEngine`). Running requests are kept.

        Args:
            init_info: `WeightTransferInitInfo`: ``master_address`` and ``master_port`` of the trainer, ``rank_offset``,
                ``world_size``; with the backend ``ipc`` nothing.
        """
        return self._held(lambda engine: engine.live.connect(init_info), "keep")

    init_weight_transfer = init_weight_transfer_engine

    def update_weights(
        self,
        update_info: Any,
        *,
        mode: str = "drain",
        check_finite: bool | None = None,
        weight_version: int | None = None,
    ) -> Any:
        """Take tensors from a trainer, which sends them meanwhile, or out of the memory of a process on the same GPU.

        With ``check_finite``, and for sparse updates, all is received before anything is written. Otherwise a tensor is
        written when it has come, and an error of the connection ends the engine.

        Args:
            update_info: `WeightTransferUpdateInfo`: ``names``, ``dtype_names`` and ``shapes``, or what
                `ipc_update_info` returns.
            mode, check_finite, weight_version: as of `reload_weights`, which also lists what is returned and raised.
        """
        options = {"check_finite": check_finite, "version": weight_version}
        return self._held(lambda engine: engine.live.receive(update_info, **options), mode)

    def start_weight_update(self, is_checkpoint_format: bool = True, *, mode: str = "drain") -> Any:
        """Pause the engine for several calls of `update_weights`, which then make one version; vLLM's call."""
        if not is_checkpoint_format:
            raise FieldError("is_checkpoint_format", "is False; send tensors as in the checkpoint")

        def start(engine: Any) -> None:
            engine.live.start_update()
            engine.pause()

        return self._held(start, mode)

    def finish_weight_update(self) -> Any:
        """End `start_weight_update`, and go on. Returns the version."""

        def finish(engine: Any) -> int:
            version = engine.live.finish_update()
            engine.resume()
            return version

        return self._held(finish, "keep")


class _Prepared(EngineCalls):
    """Returns what a call holds the loop for, and its mode, instead of calling it."""

    def __init__(self, suspension: Any) -> None:
        self.suspension = suspension

    def _held(self, function: Callable[[Any], Any], mode: str) -> Any:
        return function, mode


def prepared(
    suspension: Any, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Callable[[Any], Any], str]:
    """The function that a call by name runs while the loop is held, given the engine, and its mode.

    Raises:
        ValueError, TypeError: an argument is refused.
    """
    found: tuple[Callable[[Any], Any], str] = getattr(_Prepared(suspension), name)(*arguments, **keywords)
    return found


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A row of `CALLS`."""

    runs: Literal["held", "ordered", "at once"]
    """``held``: between steps, when no step is in flight. ``ordered``: after the requests that came before.
    ``at once``: also while the engine is paused."""
    group: Literal["all", "one", "joined", "each", "none"] = "all"
    """The engines of a group that get it, and the reply. ``all``: the first engine's. ``one``: that of a usable engine.
    ``joined``: the lists of all as one. ``each``: a list of the engines' replies, with their names. ``none``: it is
    refused, since it connects one engine with a trainer."""
    changes: bool = False
    """Whether an engine that joins its group later has to be brought to the state after it."""
    is_update: bool = False
    """Whether it makes a version of the weights, the same for all engines of a group."""
    is_for_all_ranks: bool = False
    """Whether ``collective_rpc`` can call it, for the engine rather than on each worker."""


_CHANGE = EngineCall("held", changes=True)
_UPDATE = EngineCall("held", changes=True, is_update=True, is_for_all_ranks=True)
_TRAINER = EngineCall("held", "none", changes=True, is_for_all_ranks=True)
_LOOK = EngineCall("held", is_for_all_ranks=True)

WORKER_CALLS = ("balance_report", "compiled_kernels")
"""Methods of a worker that clients in other processes may call; none has arguments, or changes anything."""

CALLS: Mapping[str, EngineCall] = {
    "pause_generation": _CHANGE,
    "resume_generation": _CHANGE,
    "sleep": EngineCall("held", changes=True, is_for_all_ranks=True),
    "wake_up": EngineCall("held", changes=True, is_for_all_ranks=True),
    "reset_prefix_cache": _CHANGE,
    "collective_rpc": _CHANGE,
    "bring_to": _CHANGE,
    "update_config": EngineCall("held", changes=True, is_for_all_ranks=True),
    "reload_weights": _UPDATE,
    "apply_sparse_weight_patches": _UPDATE,
    "init_weight_transfer": _TRAINER,
    "init_weight_transfer_engine": _TRAINER,
    "start_weight_update": _TRAINER,
    "update_weights": _TRAINER,
    "finish_weight_update": _TRAINER,
    "weight_checksums": _LOOK,
    "weights_identity": _LOOK,
    "start_profile": EngineCall("held"),
    "stop_profile": EngineCall("held", "joined"),
    "abort_requests": EngineCall("ordered", "joined"),
    "drain": EngineCall("ordered"),
    "stats": EngineCall("at once"),
    "check_integrity": EngineCall("at once"),
    "metrics": EngineCall("at once", "each"),
    "watch": EngineCall("at once", "each"),
    "ping": EngineCall("at once", "one"),
    "state": EngineCall("at once", "one"),
    "compile_grammar": EngineCall("at once", "one"),
}
"""By name. ``held`` calls are methods of `EngineCalls`, but ``bring_to``, by which a group makes its engines alike; the
others are methods of `fleetfoot.engine.remote_calls.RemoteCalls` or of `LLMEngine`."""

RPC_METHODS = (*WORKER_CALLS, *(name for name, call in CALLS.items() if call.is_for_all_ranks))
"""What ``collective_rpc`` of clients in other processes may name."""

"""Live updates of weights and settings: what an engine does while its loop is held."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfoot.config.weight_transfer import WeightTransferConfig
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.input_processor import InputProcessor
from fleetfoot.engine.kept_weights import KeptWeights, NoKeptWeights, Stage
from fleetfoot.plan.plan import EnginePlan, engine_fingerprint
from fleetfoot.plan.resolve import find_model
from fleetfoot.records.weights import WeightError
from fleetfoot.sampling.request_params import read_sampling_defaults
from fleetfoot.utils.validation import FieldError, FieldTypeError
from fleetfoot.weights.identity import WeightsIdentity, digest_of

if TYPE_CHECKING:  # an engine with worker processes imports torch when its weights change
    import torch

    from fleetfoot.weights.patches import SparseWeightPatch
    from fleetfoot.weights.store import StageReport

_CHUNK_BYTES = 1 << 28
"""Bytes of tensors that are sent to worker processes at once."""
_MAX_LISTED = 10
_LM_HEAD = "lm_head.weight"
_DRAFTER = "drafter."  # before the names of a drafter's tensors
_Base = tuple[Stage, WeightsIdentity]
"""What stages all of a model's weights, and their identity."""


class LiveWeights:
    """The weights of an engine. Its methods run in the function of a `Hold`.

    Args:
        change: called with each new version and its identity, see `Scheduler.change_weights`.
        failing: a context in which exceptions end the engine.
    """

    def __init__(
        self, core: EngineCore, plan: EnginePlan, change: Callable[..., None], failing: Callable[[], Any]
    ) -> None:
        self.version = 0
        """The version of the weights in use; 0: those of the start."""
        self._core, self._plan = core, plan
        self.path, self.load_format = str(plan.model_path), plan.config.load_format
        """What `reload` reads by default."""
        self.source: str | None = None
        """The folder or hub id of the last update with all tensors; None: the model of the start."""
        self.settings: dict[str, Any] = {}
        """What `update_settings` has changed."""
        self.config = plan.config.weight_transfer_config or WeightTransferConfig()
        self._is_connected = self._is_open = self._is_written = False
        self._base: _Base = (self._read(self.path), plan.weights)  # the last update that had all tensors
        self._changed: set[str] = set()  # names of tensors that were updated since, one by one
        self._identity: str | None = None  # None: is computed when it is needed
        self._states_identity = False
        call: Callable[..., Any] = lambda method, *args: self._core.executor.collective_rpc(method, args)  # noqa: E731
        self._is_drawn_anew = False  # by a ``load_format`` that has changed
        is_here = plan.config.nnodes == 1 and plan.executor != "ray"
        self._kept = KeptWeights(call, self.config) if plan.max_restarts and is_here else NoKeptWeights()
        self.is_asleep = False
        """Whether the weights have no memory; see `fleetfoot.engine.sleep`."""
        self._can_reload = True  # whether weights that sleep has dropped can be read again
        self._change, self._failing = change, failing

    @property
    def has_own_weights(self) -> bool:
        """Whether weights in use are in no folder: they were given as tensors or patches, or drawn anew."""
        return bool(self._changed) or self._is_drawn_anew

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank's `WeightStore`."""
        return self._core.executor.collective_rpc("call_weights", (method, *args), kwargs)

    def reload(self, weights: Any, *, check_finite: bool | None, version: int | None) -> int:
        """See `EngineCalls.reload_weights`."""
        check_finite = self.config.check_finite if check_finite is None else check_finite
        if weights is None or isinstance(weights, str | os.PathLike):
            folder = self.path if weights is None else find_model(os.fspath(weights))
            if self._plan.pooling is not None and self._plan.pooling.projections:
                raise ValueError(
                    "this model has dense layers of sentence-transformers, which are read at the start alone; make a "
                    "new engine of the checkpoint, or give the tensors of the decoder"
                )
            stage = self._read(str(folder), is_default=weights is None)
            is_drawn = stage[0] == "stage_dummy"
            base = (stage, self._plan.weights if is_drawn else self._plan.weights.with_folder(Path(folder)))
            options = {} if is_drawn else {"check_finite": check_finite}
            new = self._apply([(*stage[:2], options)], version, base)
            of_start = str(self._plan.model_path), self._plan.config.load_format
            is_of_start = weights is None and (self.path, self.load_format) == of_start
            self.source = None if is_of_start or is_drawn else os.fspath(self.path if weights is None else weights)
            self._is_drawn_anew = is_drawn and self._plan.config.load_format != "dummy"
            return new
        pairs = _read_all(weights)
        is_local = hasattr(self._core.executor, "runner")
        options = {"check_finite": check_finite, "keeps_parts": not is_local}
        parts = [pairs] if is_local else _chunks(pairs)
        return self._apply((("stage_tensors", (part,), options) for part in parts), version)

    def patch(self, patches: Any, *, check_finite: bool | None, version: int | None) -> int:
        """See `EngineCalls.apply_sparse_weight_patches`."""
        check_finite = self.config.check_finite if check_finite is None else check_finite
        if isinstance(patches, Mapping | str) or not isinstance(patches, Iterable):
            raise FieldTypeError("patches", f"is a {type(patches).__name__}; it must be a list of patches")
        from fleetfoot.weights.patches import SparseWeightPatch

        parsed = [SparseWeightPatch.parse(patch, index) for index, patch in enumerate(patches)]
        if not parsed:  # the weights stay, and so does all KV
            if version not in (None, self.version):
                raise FieldError(
                    "weight_version",
                    f"is {version!r}, but patches is empty, so the weights stay those of version "
                    f"{self.version}; leave weight_version out, or give a patch",
                    version,
                )
            return self.version
        return self._apply([("stage_patches", (parsed,), {"check_finite": check_finite})], version, patches=parsed)

    def checksums(self, names: Iterable[str] | None) -> dict[str, str]:
        """See `EngineCalls.weight_checksums`."""
        self._check_awake()
        chosen = None if names is None else list(names)
        from fleetfoot.weights.checksums import join_checksums

        found = join_checksums(self.call("checksums", chosen))
        if chosen is not None and len(found) < len(set(chosen)):
            raise WeightError(
                f"names has {', '.join(sorted(set(chosen) - found.keys()))}; the model has no such tensor"
            )
        return found

    def remember_source(self) -> None:
        """Note whether the weights in use can be read again, before sleep drops them."""
        self._can_reload = self._kept.is_kept or not self._changed

    def restore_lost(self) -> None:
        """Read tensors that sleep has dropped, and that no update has replaced since, from where they came. Raises
        WeightError: they came from memory, or cannot be read."""
        lost = set[str]().union(*self.call("lost_names"))
        if not lost:
            return
        if not self._can_reload:
            raise WeightError(
                f"sleep has dropped {len(lost)} tensors that were given as tensors or patches ({min(lost)}, for "
                "instance); give them to reload_weights, and then call wake_up again"
            )
        self._core.executor.collective_rpc("reload_lost_drafter")
        stage, weights = self._base
        with self._failing():
            for part in ((*stage[:2], {"only_lost": True}), *self._kept.stages(lost)):
                self._stage([part])
                self.call("commit", self.version)
            weights.check()

    # --- from a trainer -----------------------------------------------------------------------------------------------

    def connect(self, init_info: Any) -> None:
        """See `EngineCalls.init_weight_transfer_engine`."""
        backend, plan = self.config.backend, self._plan
        if backend == "ipc":
            return
        if backend == "auto":
            backend = "nccl" if plan.device == "cuda" else "gloo"
        if backend == "nccl" and plan.device != "cuda":
            raise ValueError(
                "weight_transfer_config: backend is 'nccl', and the engine runs on a CPU; set it to 'gloo'"
            )
        from fleetfoot.weights.transfer import WeightTransferInitInfo, parse_info

        info, size = parse_info(WeightTransferInitInfo, "init_info", init_info), plan.config.world_size
        if info.rank_offset < 1 or info.rank_offset + size > info.world_size:
            raise ValueError(
                f"init_info: rank_offset {info.rank_offset} and {size} workers do not fit in world_size "
                f"{info.world_size}; the trainer has rank 0"
            )
        plan.config.check_trusted("init_info.master_address", info.master_address)
        self._core.executor.collective_rpc("connect_weights", (info, backend))
        self._is_connected = True

    def receive(self, update_info: Any, *, check_finite: bool | None, version: int | None) -> int:
        """See `EngineCalls.update_weights`."""
        from fleetfoot.weights.transfer import WeightTransferUpdateInfo, parse_info

        info = parse_info(WeightTransferUpdateInfo, "update_info", update_info)
        options = {"check_finite": self.config.check_finite if check_finite is None else check_finite}
        if info.ipc_handles is not None:
            return self._apply([("stage_handles", (info,), options)], version)
        if not self._is_connected:
            raise WeightError("there is no connection to a trainer: call init_weight_transfer_engine first")
        has_answered = False

        def stages() -> Iterator[Stage]:
            nonlocal has_answered
            yield "stage_announced", (info,), {}
            self.call("answer")
            has_answered = True
            if options["check_finite"] or info.num_updates_list is not None:
                yield "stage_received", (), options

        try:
            return self._apply(stages(), version)
        except Exception as error:
            if not has_answered:
                self.call("answer", str(error))
            raise

    def start_update(self) -> None:
        """All updates until `finish_update` are one version."""
        if self._is_open:
            raise WeightError("an update has started before, and is not finished; call finish_weight_update")
        self._is_open, self._is_written = True, False

    def finish_update(self) -> int:
        """Returns the version."""
        if not self._is_open:
            raise WeightError("no update has started; call start_weight_update first")
        self._is_open = False
        return self.version

    # --- committing ---------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give new workers the weights in use, and the scheduler their identity. Raises WeightError: they could not be
        kept, or a file has changed."""
        stage, weights = self._base
        for part in (*([] if weights is self._plan.weights else [stage]), *self._kept.stages()):
            self._stage([part])
            self.call("commit", self.version)
        weights.check()
        if self.version:
            self._core.scheduler.change_weights(self._label(), is_shared=self._plan.connector is not None)

    def identity(self) -> str:
        """32 hex digits over every byte of the weights in use, a drafter's included. They are equal for equal files and
        the same updates, whatever way these came. Runs between steps, like the others."""
        if self._identity is None:
            changed = self._changed
            if not changed:
                return self._base[1].value()
            models = {name for name in set[str]().union(*self.call("names")) if not name.startswith(_DRAFTER)}
            base = "" if models <= changed and self._plan.drafter.model is None else self._base[1].value()
            sums = self.checksums(changed)
            self._identity = digest_of([base, *(f"{name} {sums[name]}" for name in sorted(sums))])
        return self._identity

    def state_identity(self) -> None:
        """Compute the identity now and within each update, for an engine that others are compared with."""
        self._states_identity = True
        self.identity()

    @property
    def stated_identity(self) -> str:
        """The identity, which takes no time; empty: it is not stated."""
        return self.identity() if self._states_identity else ""

    def close(self) -> None:
        """Remove what is kept of the weights."""
        self._kept.close()

    def _label(self) -> str:
        """What the scheduler calls the weights. Connectors share KV by it, so without one it need not be computed."""
        if self._plan.connector is None:
            return f"weights {self.version}"
        return engine_fingerprint(self._plan, self.identity())

    def _read(self, folder: str, *, is_default: bool = True) -> Stage:
        """The stage of a folder's weights; of random ones, if ``load_format`` is dummy and the folder the default."""
        if is_default and self.load_format == "dummy":
            return "stage_dummy", (self._plan.config.seed,), {}
        return "stage_checkpoint", (folder,), {}

    def _apply(
        self,
        stages: Iterable[Stage],
        version: int | None,
        base: _Base | None = None,
        patches: Iterable[SparseWeightPatch] | None = None,
    ) -> int:
        """Stage an update on every rank, and commit it if all ranks can. ``base``: the update has all of the model's
        tensors; ``patches``: it is nothing else. Returns the new version."""
        is_further = self._is_open and self._is_written  # of a version that has not been used yet
        new = self.version + (not is_further) if version is None else version
        if isinstance(new, bool) or not isinstance(new, int) or new < self.version + (not is_further):
            raise FieldError(
                "weight_version", f"is {new!r}; it must be an integer above the current one, {self.version}", new
            )
        if base is not None:
            (base[1].note if self._plan.connector is None else base[1].start)()
        staged = self._stage(stages)
        with self._failing():  # a rank that has failed in the middle has weights of both versions
            self.call("commit", new)
            self.version, self._is_written, self._identity = new, True, None
            if base is not None:
                base[1].check()
                self._base = base
                replaced = {name for name in self._changed if not name.startswith(_DRAFTER)}
                self._changed -= replaced
                self._kept.forget(replaced)
            elif patches is not None:
                by_name: dict[str, list[SparseWeightPatch]] = {}
                for patch in patches:
                    by_name.setdefault(staged[patch.name], []).append(patch)
                self._changed |= by_name.keys()
                self._kept.patch(by_name)
            else:
                self._changed |= set(staged.values())
                self._kept.save(set(staged.values()))
            if self._states_identity:
                self.identity()
            self._change(new, self._label(), is_shared=self._plan.connector is not None)
        return new

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise RuntimeError("the weights sleep; call wake_up(tags=['weights']) first")

    def _stage(self, stages: Iterable[Stage]) -> dict[str, str]:
        """Returns the tensors that it has: the name of each as given, and that in the model. Raises WeightError, with
        nothing staged, if an update does not fit."""
        self._check_awake()
        staged: dict[str, str] = {}
        ignored = {_LM_HEAD} if self._plan.model.head != "logits" else set()
        try:
            for method, args, kwargs in stages:
                is_of_worker = method == "stage_saved"  # which has its rank
                call = self._core.executor.collective_rpc
                reports: list[StageReport] = (
                    call(method, args, kwargs) if is_of_worker else self.call(method, *args, **kwargs)
                )
                for report in reports:
                    staged |= report.staged
                unknown = set.intersection(*(report.unknown for report in reports)) - ignored
                problems = [f"{name} is unknown: the model has no such tensor" for name in sorted(unknown)]
                problems += dict.fromkeys(problem for report in reports for problem in report.problems)
                if problems:
                    more = f"\n  and {len(problems) - _MAX_LISTED} more" * (len(problems) > _MAX_LISTED)
                    listed = "".join(f"\n  {problem}" for problem in problems[:_MAX_LISTED])
                    raise WeightError(f"no weight was changed: the update does not fit{listed}{more}")
        except BaseException:
            self.call("discard")
            raise
        return staged


def _read_all(weights: Any) -> list[tuple[str, torch.Tensor]]:
    """The pairs of an iterable, all of which are read before one is used."""
    pairs: list[tuple[str, Any]] = []
    counts: list[Any] = []
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and hasattr(pair[1], "data_ptr")):
            raise FieldTypeError("weights", f"has {pair!r:.200}; it must be a folder, or pairs of a name and a tensor")
        pairs.append((str(pair[0]), pair[1]))
        counts.append(None if pair[1].is_inference() else pair[1]._version)
    if not pairs:
        raise WeightError("weights has no tensors")
    for (name, tensor), count in zip(pairs, counts, strict=True):
        if count is not None and tensor._version != count:
            raise WeightError(f"weights: {name} was overwritten before all had been read; yield tensors of their own")
    return pairs


def _chunks(pairs: list[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    chunk: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in pairs:
        if chunk and size + tensor.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        # a tensor of its own, because a view is sent with its whole storage
        chunk.append((name, tensor.detach().clone()))
        size += tensor.nbytes
    yield chunk


# --- settings ---------------------------------------------------------------------------------------------------------

LIVE_SETTINGS = ("load_format", "max_logprobs", "max_num_batched_tokens", "model", "override_generation_config")
_GROUPS = ("model_config", "load_config", "scheduler_config")


def update_settings(
    settings: Mapping[str, Any], live: LiveWeights, plan: EnginePlan, core: EngineCore, processor: InputProcessor
) -> None:
    """See `EngineCalls.update_config`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= value if name in _GROUPS and isinstance(value, Mapping) else {name: value}
    if refused := [name for name in flat if name not in LIVE_SETTINGS]:
        raise FieldError(
            ", ".join(refused), f"cannot change while the engine runs; what can: {', '.join(LIVE_SETTINGS)}"
        )
    config = replace(plan.config, **flat)  # checks all values
    budget, scheduling = flat.get("max_num_batched_tokens"), core.scheduler.config
    if budget is not None:
        if budget > plan.max_num_batched_tokens:
            raise FieldError(
                "max_num_batched_tokens",
                f"is {budget}; the engine was started for up to {plan.max_num_batched_tokens}",
                budget,
            )
        scheduling = replace(scheduling, max_num_batched_tokens=budget)
        for request in core.scheduler.requests.values():
            scheduling.check_fits(request)
    path = find_model(config.model) if "model" in flat else live.path
    defaults = read_sampling_defaults(config.generation_config, config.override_generation_config, plan.model_path)
    core.scheduler.change_config(scheduling)
    live.path, live.load_format = str(path), flat.get("load_format", live.load_format)
    live.settings |= flat
    processor.max_logprobs = flat.get("max_logprobs", processor.max_logprobs)
    if "override_generation_config" in flat:
        processor.sampling_defaults = defaults

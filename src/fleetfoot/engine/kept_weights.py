"""Weights that came from memory, kept so that new workers can load them again.

Ranks write the values that they hold to files, in memory (``/dev/shm``) up to a limit, on disk beyond. Patches stay as
they are while they are smaller than their tensors. A later update of a tensor replaces what was kept of it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfoot.config.weight_transfer import WeightTransferConfig
from fleetfoot.records.weights import WeightError
from fleetfoot.utils.own_files import OwnFolder

if TYPE_CHECKING:
    from fleetfoot.weights.patches import SparseWeightPatch

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")
_PREFIX = "fleetfoot-weights-"
Stage = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of `WeightStore` that stages a part of an update, and its arguments."""


class NoKeptWeights:
    """Nothing is kept: workers that end are not replaced."""

    is_kept = False

    def save(self, names: Collection[str]) -> None:
        """The tensors ``names``, by their names in the model, have new values."""

    def patch(self, patches: Mapping[str, list[SparseWeightPatch]]) -> None:
        """Patches of tensors were applied, by their names in the model."""

    def forget(self, names: Collection[str]) -> None:
        """The tensors have values that can be read elsewhere."""

    def stages(self, names: Collection[str] | None = None) -> Iterator[Stage]:
        """What stages the kept tensors, all or those of ``names``; each is committed before the next one."""
        return iter(())

    def close(self) -> None:
        """Remove all files."""


@dataclass(slots=True)
class _Saved:
    """Files of all ranks."""

    folder: Path
    names: set[str]
    num_bytes: int
    in_memory: bool


class KeptWeights(NoKeptWeights):
    """``call``: calls a method of every rank's worker."""

    is_kept = True

    def __init__(self, call: Callable[..., list[Any]], config: WeightTransferConfig) -> None:
        self._call = call
        self._limit = int(config.restart_memory_gb * (1 << 30))
        self._parent = Path(config.restart_path).expanduser() if config.restart_path else None
        self._saved: list[_Saved] = []
        self._patches: dict[str, SparseWeightPatch] = {}
        self._folders: dict[bool, OwnFolder] = {}  # in memory, on disk
        self._count = 0
        self._problem = ""  # why the weights in use cannot be loaded again

    def save(self, names: Collection[str]) -> None:
        if not names:
            return
        wanted = set(names)
        live = wanted.union(*(saved.names for saved in self._saved))
        if sum(saved.num_bytes for saved in self._saved) > self._num_bytes(live):
            wanted = live  # more than half would be replaced values
        needed = self._num_bytes(wanted)
        in_memory = sum(s.num_bytes for s in self._saved if s.in_memory and not s.names <= wanted) + needed
        try:
            folder = self._make_folder(needed, is_in_memory=in_memory <= self._limit)
            problems = self._call("save_weights", str(folder), sorted(wanted))
        except OSError as error:
            problems = [str(error)]
        self._problem = next(filter(None, problems), "")
        if self._problem:
            logger.error("the new weights cannot be kept, and a restart would lose them: %s", self._problem)
            return
        self.forget(wanted)
        self._saved.append(_Saved(folder, wanted, needed, folder.is_relative_to(_MEMORY)))

    def patch(self, patches: Mapping[str, list[SparseWeightPatch]]) -> None:
        from fleetfoot.weights.patches import merged

        for name, given in patches.items():
            earlier = [self._patches[name]] if name in self._patches else []
            self._patches[name] = merged(name, [*earlier, *given])
        num_bytes = sum(each.indices.nbytes + each.values.nbytes for each in self._patches.values())
        if num_bytes > min(self._limit, self._num_bytes(self._patches)):
            self.save(set(self._patches))

    def forget(self, names: Collection[str]) -> None:
        for name in names:
            self._patches.pop(name, None)
        for saved in self._saved:
            saved.names.difference_update(names)
            if not saved.names:
                shutil.rmtree(saved.folder, ignore_errors=True)
        self._saved = [saved for saved in self._saved if saved.names]

    def stages(self, names: Collection[str] | None = None) -> Iterator[Stage]:
        """Raises WeightError: they could not be kept."""
        if self._problem:
            raise WeightError(f"weights that were given as tensors or patches could not be kept: {self._problem}")
        for saved in self._saved:
            if chosen := sorted(saved.names if names is None else saved.names.intersection(names)):
                yield "stage_saved", (str(saved.folder), chosen), {}
        if patches := [patch for name, patch in self._patches.items() if names is None or name in names]:
            yield "stage_patches", (patches,), {}

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()
        self._folders, self._saved, self._patches = {}, [], {}

    def _num_bytes(self, names: Collection[str]) -> int:
        return sum(self._call("call_weights", "num_bytes", sorted(names)))

    def _make_folder(self, num_bytes: int, *, is_in_memory: bool) -> Path:
        if is_in_memory:
            is_in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > num_bytes + (num_bytes >> 3)
        if is_in_memory not in self._folders:
            self._folders[is_in_memory] = OwnFolder(_PREFIX, _MEMORY if is_in_memory else self._parent)
        self._count += 1
        path = self._folders[is_in_memory].path / str(self._count)
        path.mkdir()
        return path

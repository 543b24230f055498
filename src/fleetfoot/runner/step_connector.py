"""The KV connector within a step: the order of its calls, the same on both runners; `fleetfoot.runner.base` makes them.
``tests/engine/test_connector_order.py`` tests the order. The metadata is always cleared, also after an exception."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from fleetfoot.kv_transfer.base.connector import WorkerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput

logger = logging.getLogger(__name__)


class StepConnector:
    """Calls the worker side of a connector in the order of a step."""

    fills_blocks = True
    """Whether a block may hold KV that no step of this runner has computed."""
    clear_slabs: Callable[[list[int]], None]
    """Clears `SchedulerOutput.changed_slabs`; set by the runner."""
    _is_bound = False

    def __init__(self, connector: WorkerConnector) -> None:
        self._connector = connector

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._connector.register_kv_caches(kv_caches, layout)

    def pre_forward(self, scheduler_output: SchedulerOutput) -> None:
        """Called before the step writes to the KV cache."""
        self._is_bound = True
        try:
            self._connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)
            self._connector.flush()
            if scheduler_output.changed_slabs:
                self.clear_slabs(scheduler_output.changed_slabs)
            self._connector.start_load_kv()
        except BaseException:
            self.abandon()
            raise

    def post_forward(self, finished_req_ids: set[str], wait_for_save: bool = True) -> KVConnectorOutput | None:
        """Called after the last writer of the step's KV; ends the connector's step."""
        try:
            self._connector.save_kv()
            if wait_for_save:
                self._connector.wait_for_save()
            output = self._connector.get_finished(finished_req_ids)
        except BaseException:
            self.abandon()
            raise
        self._clear()
        return None if output.is_empty else output

    def no_forward(self, scheduler_output: SchedulerOutput) -> KVConnectorOutput | None:
        """A step without a forward pass."""
        self.pre_forward(scheduler_output)
        try:
            self._connector.wait_for_progress()
        except BaseException:
            self.abandon()
            raise
        return self.post_forward(scheduler_output.finished_req_ids, wait_for_save=False)

    def abandon(self) -> None:
        """Clear the metadata after an exception. An error in clearing is logged: it must not hide the first."""
        try:
            self._clear()
        except Exception:
            logger.exception("the KV connector could not clear the metadata of a failed step")

    def _clear(self) -> None:
        if self._is_bound:
            self._is_bound = False
            self._connector.clear_connector_metadata()

    def shutdown(self) -> None:
        self.abandon()
        self._connector.shutdown()


class NoConnector(StepConnector):
    """No connector is configured: no call does anything but clear slabs."""

    fills_blocks = False

    def __init__(self) -> None:
        pass

    def _do_nothing(self, *_: object, **__: object) -> None:
        pass

    def pre_forward(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.changed_slabs:
            self.clear_slabs(scheduler_output.changed_slabs)

    no_forward = pre_forward
    register_kv_caches = post_forward = shutdown = _do_nothing

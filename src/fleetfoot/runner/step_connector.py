"""The KV connector inside a step: when each of its parts is called, the same on both runners.

The written contract (``tests/engine/test_connector_order.py`` holds it against what happens):

    execute_model   pre_forward, forward; on a rank that is not last in its pipeline, post_forward at its end
    sample_tokens   sampling, drafting; then post_forward, on the last rank
    an idle step    no_forward

Whatever raises in between, the metadata is cleared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from fleetfoot.kv_transfer.base.connector import WorkerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.step import SchedulerOutput

logger = logging.getLogger(__name__)


class StepConnector:
    """Calls a `WorkerConnector` in the right order.

    Args:
        connector: this worker's side of the connector.
    """

    fills_blocks = True
    """Whether a block may hold KV that no step of this runner has computed."""

    def __init__(self, connector: WorkerConnector) -> None:
        self._connector = connector
        self._is_bound = False

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._connector.register_kv_caches(kv_caches, layout)

    def pre_forward(self, scheduler_output: SchedulerOutput) -> None:
        """Before anything of the step is written to the KV cache."""
        self._is_bound = True
        try:
            self._connector.bind(scheduler_output.kv_connector_metadata)
            self._connector.flush()
            self._connector.start()
        except BaseException:
            self.abandon()
            raise

    def post_forward(self, finished_req_ids: set[str], wait_for_save: bool = True) -> KVConnectorOutput | None:
        """After the step's last writer; ends the step for the connector."""
        try:
            self._connector.save()
            if wait_for_save:
                self._connector.wait_for_save()
            output = self._connector.take_ended(finished_req_ids)
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
        """Clear the metadata of a step that raised. What clearing raises is logged: the first cause is what counts."""
        try:
            self._clear()
        except Exception:
            logger.exception("the KV connector could not clear the metadata of a step that had failed before")

    def _clear(self) -> None:
        if self._is_bound:
            self._is_bound = False
            self._connector.clear()

    def shutdown(self) -> None:
        self.abandon()
        self._connector.shutdown()


class NoConnector(StepConnector):
    """There is none: every call does nothing."""

    fills_blocks = False

    def __init__(self) -> None:
        pass

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        pass

    def pre_forward(self, scheduler_output: SchedulerOutput) -> None:
        pass

    def post_forward(self, finished_req_ids: set[str], wait_for_save: bool = True) -> None:
        return None

    def no_forward(self, scheduler_output: SchedulerOutput) -> None:
        return None

    def abandon(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

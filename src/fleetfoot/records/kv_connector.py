"""The scheduler side of a KV connector, as a protocol. No torch.

Method names follow vLLM's ``KVConnectorBase_V1`` where the meaning is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fleetfoot.records.request import Request
    from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput


_TIMES = tuple(base * 10**power for power in range(2, 7) for base in (1, 2, 5))
_SIZES = tuple(4**power for power in range(6, 18))
_COUNTS = tuple(base * 10**power for power in range(1, 5) for base in (1, 2, 5))
READ_HISTOGRAMS: Mapping[str, tuple[str, float, tuple[int, ...]]] = {
    "read_us": ("nixl_xfer_time_seconds", 1e-6, _TIMES),
    "post_us": ("nixl_post_time_seconds", 1e-6, _TIMES),
    "read_bytes": ("nixl_bytes_transferred", 1, _SIZES),
    "read_regions": ("nixl_num_descriptors", 1, _COUNTS),
}
"""What a connector counts of each load that reads another engine's memory, as sums and as counts up to limits: vLLM's
names, the unit, and the limits."""


class SchedulerConnector(ABC):
    """The scheduler side. All methods are called between steps, in the engine's thread, and must not block."""

    is_active: ClassVar[bool] = True
    """False: no connector is configured, and blocks need not be hashed for one."""

    def check_request(self, request: Request) -> None:
        """Validate a new request. By default ``kv_transfer_params`` are not accepted.

        Raises:
            ValueError: ``request.kv_transfer_params`` are invalid for this connector; the request is refused.
        """
        if request.kv_transfer_params is not None:
            raise ValueError(
                f"kv_transfer_params is {request.kv_transfer_params!r}, but this engine has no KV connector that "
                "accepts any; leave it out, or configure such a connector in kv_transfer_config"
            )

    @property
    def takes_params(self) -> bool:
        """Whether requests can have ``kv_transfer_params``."""
        return type(self).check_request is not SchedulerConnector.check_request

    def inherit(self, previous: SchedulerConnector) -> None:  # noqa: B027  (most connectors begin anew)
        """The workers were restarted, and this connector takes the place of ``previous``, before any request. Requests
        that have not begun are checked again."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """The number of tokens that can be loaded beyond the ``num_computed_tokens`` found in the prefix cache.

        Returns a multiple of the block size that leaves at least one of ``request.num_tokens`` to compute, and after
        which every group of layers has what it reads: `usable_by_all`. None: it is not known yet; the request and
        those after it wait, and `has_pending` must be true meanwhile.
        ``request.block_hashes`` holds the chain hashes of all full blocks, without the last token's. Called again for
        as long as the request waits for free blocks; never called for a request with prompt logprobs.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        """The request waits for ``num_external_tokens`` tokens; it has their blocks (`Request.blocks_between`). The
        load goes to the workers with the metadata of the next step."""

    @abstractmethod
    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        """Blocks ``first .. last - 1`` of the request are full (of a window, those that it still has:
        `Request.blocks_between`); ``request.block_hashes`` has their hashes.

        Args:
            by_this_step: True: they are full after the step that is being scheduled, and are to be saved in
                `WorkerConnector.save_kv`. False: earlier steps have filled them, the request frees them (it has ended
                or is preempted), and the next step may overwrite them; they are to be saved in
                `WorkerConnector.flush`.
        """

    def holds_prompt(self, request: Request) -> bool:
        """Whether `request_finished` is to hold the blocks of the request's prompt. The newest recurrent state within
        the prompt is kept for it then. By default nothing is held."""
        return False

    @abstractmethod
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended and still holds its blocks. A step in flight may include it, but does not change full
        blocks of known tokens.

        Returns:
            Whether its blocks stay HELD until the workers report the request as sent, and the ``kv_transfer_params``
            of its output.
        """

    def evict(self, request_id: str) -> bool:
        """The held blocks of a request that has ended are needed. True: it will be reported as sent by the next steps,
        or when a read of its blocks that has begun has ended. By default they stay held."""
        return False

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object | None:
        """The metadata of a step for the workers: a plain record that msgspec or pickle can encode. None: no work.
        Called once for each step, idle steps included."""

    def slabs_reused(self, slabs: Iterable[int]) -> None:  # noqa: B027
        """Another connector loads into blocks of these slabs (`slab_of`) from the next step on; their previous owners
        are gone."""

    @abstractmethod
    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process transfers that have ended on all ranks. The output may include requests of other connectors."""

    @property
    def has_pending(self) -> bool:
        """Whether an idle step would carry metadata, or could report a result. Read once more at shutdown: no step
        follows then, so what this does not report is never flushed."""
        return False

    def reset_cache(self, weights: str = "") -> None:  # noqa: B027  (a connector without an index has nothing to reset)
        """The weights have changed: KV saved so far must not be loaded again. Blocks of requests that began before are
        not reported as filled.

        ``weights``: the engine's fingerprint with the new ones; empty: they are not identified, and of this engine
        alone.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Release all resources."""


class NoSchedulerConnector(SchedulerConnector):
    """No connector is configured: nothing matches and nothing is saved."""

    is_active = False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return 0

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        raise RuntimeError("no KV connector is configured, so nothing can be loaded")

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        pass

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

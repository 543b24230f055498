"""The scheduler's side of a KV connector, as a protocol. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from fleetfoot.records.kv_output import KVConnectorOutput

if TYPE_CHECKING:
    from fleetfoot.records.request import Request
    from fleetfoot.records.step import SchedulerOutput


class SchedulerConnector(ABC):
    """The scheduler's side. Everything is called between steps, in the engine's thread; nothing may block."""

    is_active: ClassVar[bool] = True
    """False: there is no connector, and nobody needs to hash blocks for it."""

    def check_request(self, request: Request) -> None:
        """Called when a request comes. Most connectors take no ``kv_transfer_params``.

        Raises:
            ValueError: ``request.kv_transfer_params`` mean nothing here; the request is refused.
        """
        if request.kv_transfer_params is not None:
            raise ValueError(
                f"kv_transfer_params is {request.kv_transfer_params!r}, but this engine has no KV connector that takes "
                "any; leave it out, or name a connector that does in kv_transfer_config"
            )

    @abstractmethod
    def num_matched_tokens(self, request: Request, num_local: int) -> int:
        """Tokens of the request's beginning whose KV could be loaded, beyond the ``num_local`` that are here.

        A multiple of the block size; at least one token of ``request.num_tokens`` must be left to compute. May be
        asked again and again for a request that finds no room. Never asked for one that wants prompt logprobs.
        ``request.block_hashes`` holds the chain hashes of all full blocks but the last token's.
        """

    @abstractmethod
    def start_load(self, request: Request, num_local: int, num_matched: int) -> None:
        """The request waits for these tokens; ``request.block_ids`` has room for them. Tell the workers with the next
        step's metadata."""

    @abstractmethod
    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        """Blocks ``first .. last - 1`` of ``request.block_ids`` are full; their chain hashes are in
        ``request.block_hashes``.

        Args:
            by_this_step: they are full once the step that is being made has run, and belong into
                `WorkerConnector.save`. Else steps that were queued earlier have filled them, their request is giving
                them back (it ended, or is preempted), and the step that is made next may overwrite them: they belong
                into `WorkerConnector.flush`.
        """

    @abstractmethod
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, and still has its blocks. A step in flight may hold it, but no longer changes the full
        blocks of tokens that are known.

        Returns:
            Whether its blocks are to stay LENT until the workers report it as sent, and what the request's output says
            under ``kv_transfer_params``.
        """

    @abstractmethod
    def build_metadata(self, scheduler_output: SchedulerOutput) -> object | None:
        """What the workers have to do in this step; a plain record that msgspec or pickle can carry. Called once for
        each step, the idle ones included. None: nothing."""

    def blocks_reused(self, block_ids: list[int]) -> None:  # noqa: B027
        """Another connector loads into these blocks from the next step on; their last owners are gone."""

    @abstractmethod
    def update(self, output: KVConnectorOutput) -> None:
        """What has ended on all ranks. Requests that this connector did not load or send are another one's."""

    @property
    def has_pending(self) -> bool:
        """Whether an idle step would have something to tell the workers, or to hear from them. Asked once more when the
        engine is shut down: there is no other step then, so what this keeps silent about is never flushed."""
        return False

    def forget(self) -> None:  # noqa: B027  (most connectors have nothing to forget)
        """Weights have changed: nothing that was saved so far may be loaded again. Blocks of requests that began before
        are not reported as filled any more."""

    def shutdown(self) -> None:  # noqa: B027
        """Give everything back."""


class NoSchedulerConnector(SchedulerConnector):
    """There is none: nothing matches, nothing is saved."""

    is_active = False

    def num_matched_tokens(self, request: Request, num_local: int) -> int:
        return 0

    def start_load(self, request: Request, num_local: int, num_matched: int) -> None:
        raise RuntimeError("there is no KV connector that could load anything")

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        pass

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def build_metadata(self, scheduler_output: SchedulerOutput) -> None:
        return None

    def update(self, output: KVConnectorOutput) -> None:
        pass

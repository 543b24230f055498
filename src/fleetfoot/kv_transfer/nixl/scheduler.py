"""The scheduler's side of the NIXL connector: what is lent, and what is read from whom. No torch."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.nixl.orders import Grant, NixlOrders, PullOrder
from fleetfoot.kv_transfer.nixl.params import (
    RemotePrefill,
    engine_description,
    parse_params,
    wants_remote_decode,
)
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import SchedulerOutput

logger = logging.getLogger(__name__)


class NixlScheduler(SchedulerConnector):
    """Lends the blocks of prompts that ended here, and has those read that were computed elsewhere.

    What is lent is always the prompt's full blocks, but never its last token, which a reader computes itself.
    """

    def __init__(self, context: TransferContext) -> None:
        self._context = context
        self._config = context.config
        self._mine = engine_description(context, context.fingerprint)
        self._orders = NixlOrders()
        self._wanted: dict[str, RemotePrefill] = {}  # requests that have neither begun to load nor to run
        self._addresses: dict[int, str] = {}  # rank -> its side channel
        self._has_other_weights = False

    def check_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is None:
            return
        remote = parse_params(params)
        if wants_remote_decode(params) and not self._config.can_save:
            raise ValueError(self._wrong_role("do_remote_decode", "kv_producer or kv_both"))
        if remote is not None:
            if not self._config.can_load:
                raise ValueError(self._wrong_role("do_remote_prefill", "kv_consumer or kv_both"))
            self._wanted[request.request_id] = remote

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        remote = self._wanted.get(request.request_id)
        if remote is None:
            return 0
        block_size = self._context.block_size
        most = (request.num_tokens - 1) // block_size * block_size
        if not self._refusal(remote, request):  # else there is nothing to load, and the load is to fail
            most = min(most, remote.remote_num_tokens)
        return max(0, most - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        remote = self._wanted.pop(request.request_id)
        first = num_computed_tokens // self._context.block_size
        last = first + num_external_tokens // self._context.block_size
        refusal = self._refusal(remote, request)
        order = PullOrder(request.request_id, remote.source, first, request.block_ids[first:last], refusal)
        self._orders.pulls.append(order)

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        """Blocks stay where they are until their request has ended."""

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._decline(request.request_id)
        if not wants_remote_decode(request.kv_transfer_params) or self._has_other_weights:
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_STOPPED):
            return False, None
        if len(self._addresses) < self._context.num_ranks:
            logger.warning("KV of request %r is not lent: not all ranks have said where", request.request_id)
            return False, None
        block_size = self._context.block_size
        num_blocks = min((request.num_prompt_tokens - 1) // block_size, len(request.block_hashes))
        if num_blocks == 0:
            return False, None
        lease = secrets.token_hex(16)
        self._orders.grants.append(Grant(lease, request.request_id, request.block_ids[:num_blocks]))
        remote = RemotePrefill(
            remote_engine_id=self._context.engine_id,
            remote_request_id=request.request_id,
            remote_addresses=[self._addresses[rank] for rank in range(self._context.num_ranks)],
            remote_lease=lease,
            remote_num_tokens=num_blocks * block_size,
            remote_prefix_hash=request.block_hashes[num_blocks - 1].hex(),
            remote_engine=self._mine,
        )
        return True, remote.as_params()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlOrders | None:
        for request in scheduler_output.new_requests:  # it runs without: all of it is here, or it may not load
            self._decline(request.request_id)
        orders, self._orders = self._orders, NixlOrders()
        return None if orders.is_empty else orders

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._addresses.update(output.addresses)

    @property
    def has_pending(self) -> bool:
        return not self._orders.is_empty

    def reset_cache(self) -> None:
        """No other engine has these weights."""
        self._has_other_weights = True

    def _decline(self, request_id: str) -> None:
        remote = self._wanted.pop(request_id, None)
        if remote is not None:
            self._orders.declines.append(remote.source)

    def _refusal(self, remote: RemotePrefill, request: Request) -> str:
        """Why the KV that is offered is not the request's; empty: it is."""
        who = f"engine {remote.remote_engine_id!r} offers KV"
        if self._has_other_weights:
            return f"{who} of the weights that this engine was started with, and these were replaced"
        unlike = [
            f"its {name} is {remote.remote_engine.get(name)!r}, and {mine!r} here"
            for name, mine in self._mine.items()
            if remote.remote_engine.get(name) != mine
        ]
        if unlike:
            return f"{who} that means something else: {'; '.join(unlike)}"
        if len(remote.remote_addresses) != self._context.num_ranks:
            return f"{who} of {len(remote.remote_addresses)} ranks, and this engine has {self._context.num_ranks}"
        num_blocks, rest = divmod(remote.remote_num_tokens, self._context.block_size)
        if rest or num_blocks > len(request.block_hashes):
            return (
                f"{who} of {remote.remote_num_tokens} tokens, and the request has {request.num_tokens}, in blocks of "
                f"{self._context.block_size}, the last token left out"
            )
        mine = request.block_hashes[num_blocks - 1].hex()
        if remote.remote_prefix_hash != mine:
            return (
                f"{who} of other tokens or another cache_salt: its prefix hash is {remote.remote_prefix_hash}, and "
                f"{mine} here"
            )
        return ""

    def _wrong_role(self, name: str, roles: str) -> str:
        return (
            f"kv_transfer_params: {name} is true, but kv_role is {self._config.kv_role!r} in this engine's "
            f"kv_transfer_config; it must be {roles} for that"
        )

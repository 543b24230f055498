"""The NIXL connector and its scheduler side: the decode engine reads KV from the prefill engine's memory. No torch."""

from __future__ import annotations

import logging
import time
from itertools import chain
from typing import Any, ClassVar

from fleetfoot.config import env
from fleetfoot.kv_transfer.base.connector import (
    ARENA,
    BLOCK_CONTIGUOUS_HND,
    KVConnector,
    SchedulerConnector,
    TransferContext,
    WorkerConnector,
    warn_of_unused_fields,
)
from fleetfoot.kv_transfer.base.offers import (
    DO_REMOTE_DECODE,
    DO_REMOTE_PREFILL,
    Offer,
    Offers,
    is_remote_decode,
    offer_params,
    parse_params,
)
from fleetfoot.kv_transfer.nixl.params import (
    RENEW_SECONDS,
    Hold,
    LoadSpec,
    NixlMetadata,
    NixlSettings,
    differences,
    engine_description,
)
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput
from fleetfoot.utils.cluster_key import ClusterKey, find_cluster_key

logger = logging.getLogger(__name__)


class NixlConnector(KVConnector):
    """Settings: `NixlSettings`."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({ARENA, BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        NixlSettings.of(context.config, num_ranks=context.num_ranks)
        warn_of_unused_fields(context.config)

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        settings = NixlSettings.of(context.config, num_ranks=context.num_ranks)
        hosts = settings.side_channel_host, *(peer.partition(":")[0] for peer in settings.peers)
        key = _find_key(context, *hosts)
        return NixlScheduler(context, Offers(key, settings.peers, settings.kv_lease_duration))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.nixl.worker import NixlWorker

        settings = NixlSettings.of(context.config, num_ranks=context.num_ranks)
        return NixlWorker(context, settings, _find_key(context, settings.side_channel_host))


def _find_key(context: TransferContext, *hosts: str) -> ClusterKey:
    file = None if context.engine is None else context.engine.cluster_key_file
    return find_cluster_key(file, env.cluster_key(), hosts)


class NixlScheduler(SchedulerConnector):
    """Holds the blocks of prompts that ended here, and has prompts loaded that were computed by another engine.

    Held are the full blocks of a prompt without its last token, which the consumer computes itself.
    """

    def __init__(self, context: TransferContext, offers: Offers) -> None:
        self._context = context
        self._offers = offers
        self._config = context.config
        self._description = engine_description(context)
        self._metadata = NixlMetadata()
        self._offered: dict[str, Offer] = {}  # requests that have neither begun to load nor to run
        self._loading: dict[str, Offer] = {}
        self._held: dict[str, str] = {}  # requests that have ended -> their lease
        self._clock = context.clock or time.monotonic
        self._next_renewal = self._clock()
        self._addresses: dict[int, str] = {}  # rank -> its side channel
        self._has_new_weights = False

    def check_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is None:
            return
        text = parse_params(params)
        for is_set, is_allowed, name, roles in (
            (is_remote_decode(params), self._config.can_save, DO_REMOTE_DECODE, "kv_producer or kv_both"),
            (text is not None, self._config.can_load, DO_REMOTE_PREFILL, "kv_consumer or kv_both"),
        ):
            if is_set and not is_allowed:
                raise ValueError(
                    f"kv_transfer_params.{name} is true, but kv_role is {self._config.kv_role!r} in this engine's "
                    f"kv_transfer_config; it must be {roles} for that"
                )
        if text is not None:
            self._offered[request.request_id] = self._offers.accept(text, request)

    def inherit(self, previous: SchedulerConnector) -> None:
        assert isinstance(previous, NixlScheduler)
        self._offers = previous._offers
        for offer in previous._offered.values():
            self._offers.release(offer)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        offer = self._offered.get(request.request_id)
        if offer is None:
            return 0
        block_size = self._context.block_size
        num_tokens = (request.num_tokens - 1) // block_size * block_size
        if not self._refusal(offer):  # else the load must start, and fail
            num_tokens = min(num_tokens, offer.num_tokens)
        return max(0, num_tokens - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        offer = self._loading[request.request_id] = self._offered.pop(request.request_id)
        first = num_computed_tokens // self._context.block_size
        last = first + num_external_tokens // self._context.block_size
        block_ids = [ids for _, _, ids in request.blocks_between(first, last)]
        self._metadata.loads.append(LoadSpec(request.request_id, offer, block_ids, self._refusal(offer)))

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        """Nothing is copied: blocks are held when their request has ended."""

    def holds_prompt(self, request: Request) -> bool:
        return is_remote_decode(request.kv_transfer_params)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._decline(request.request_id)
        is_complete = request.status in (RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_STOPPED)
        if not is_remote_decode(request.kv_transfer_params) or self._has_new_weights or not is_complete:
            return False, None
        num_ranks, block_size = self._context.num_ranks, self._context.block_size
        if len(self._addresses) < num_ranks:
            logger.warning("KV of request %r is not held: not all ranks have an address yet", request.request_id)
            return False, None
        groups, num_blocks = self._context.groups, (request.num_prompt_tokens - 1) // block_size
        num_blocks = min(num_blocks, len(request.block_hashes))
        if groups[-1].is_state:  # as far as the newest state that was kept
            blocks = request.blocks_between(0, num_blocks)
            num_blocks = max((begin + 1 for group, begin, _ in blocks if groups[group].is_state), default=0)
        needed = [group.first_block(num_blocks * block_size, block_size) for group in groups]
        held = [
            (begin, ids)
            for group, begin, ids in request.blocks_between(0, num_blocks)
            if not groups[group].is_state or begin == needed[group]
        ]
        if num_blocks == 0 or any(begin > first for (begin, _), first in zip(held, needed, strict=True)):
            return False, None  # or its output was so long that the prompt's window was freed
        offer, text = self._offers.make(
            request,
            engine_id=self._context.engine_id,
            engine=self._description,
            addresses=[self._addresses[rank] for rank in range(num_ranks)],
            num_tokens=num_blocks * block_size,
        )
        self._held[request.request_id] = offer.lease
        self._metadata.holds.append(Hold(offer.lease, request.request_id, [ids for _, ids in held]))
        return True, offer_params(text)

    def evict(self, request_id: str) -> bool:
        if request_id in self._held:
            self._metadata.evictions.append(self._held[request_id])
        return request_id in self._held

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlMetadata | None:
        for request in scheduler_output.new_requests:  # scheduled without a load: everything was cached
            self._decline(request.request_id)
        if (self._offered or self._loading) and (now := self._clock()) >= self._next_renewal:
            self._next_renewal = now + RENEW_SECONDS
            self._metadata.renewals += chain(self._offered.values(), self._loading.values())
        metadata, self._metadata = self._metadata, NixlMetadata()
        return None if metadata == NixlMetadata() else metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._addresses.update(output.addresses)
        for request_id in (*output.loaded, *output.failed):
            self._loading.pop(request_id, None)
        for request_id in output.sent:
            self._held.pop(request_id, None)

    @property
    def has_pending(self) -> bool:
        return self._metadata != NixlMetadata()

    def reset_cache(self, weights: str = "") -> None:
        self._has_new_weights = not weights
        self._description = engine_description(self._context, weights)

    def _decline(self, request_id: str) -> None:
        offer = self._offered.pop(request_id, None)
        if offer is not None:
            self._metadata.declines.append(offer)

    def _refusal(self, offer: Offer) -> str:
        """Why KV of the request's prompt cannot be loaded; empty: it can."""
        offered = f"engine {offer.engine_id!r} offers KV"
        if self._has_new_weights:
            return f"{offered} of weights that this engine had before, and these were replaced"
        if found := differences(theirs=offer.engine, ours=self._description):
            return f"{offered} that is incompatible: {found}"
        if len(offer.addresses) != self._context.num_ranks:
            return f"{offered} of {len(offer.addresses)} ranks, and this engine has {self._context.num_ranks}"
        if offer.num_tokens % self._context.block_size:
            return f"{offered} of {offer.num_tokens} tokens, which are no whole blocks of {self._context.block_size}"
        return ""

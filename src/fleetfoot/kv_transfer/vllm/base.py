"""The base class of connectors that are written for vLLM, with vLLM's names. No torch.

`fleetfoot.kv_transfer.vllm.adapter` makes both sides of a connector of such a class, and calls its methods. Its methods
get the records of `fleetfoot.kv_transfer.vllm.records`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fleetfoot.kv_transfer.vllm.records import (
        AttentionMetadata,
        ForwardContext,
        KVCacheBlocks,
        KVCacheConfig,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
        VllmConfig,
    )


class KVConnectorRole(enum.Enum):
    """The side of a connector that an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """Base of what `KVConnectorBase_V1.build_connector_meta` returns. It is pickled."""


class SupportsHMA:
    """Base of connectors that accept several groups of KV blocks. There is one, so `request_finished` is called."""


class KVConnectorBase_V1(ABC):  # noqa: N801
    """A connector: one object in the scheduler, and one on each rank."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """``NHD``, ``HND``, or the name of a KV layout; None: ``accepted_kv_layouts`` if the class has it, else
        ``NHD``. Called when an engine is planned, before the model is read."""
        return None

    @classmethod  # noqa: B027  (a connector without settings has nothing to check)
    def check_settings(cls, vllm_config: VllmConfig) -> None:
        """Validate the settings when an engine is planned; not a method of vLLM's. Raises ValueError or TypeError."""

    # --- the worker side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Called once, with the KV cache of each layer of this rank by the layer's name."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called at the beginning of every step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Called at the end of every step, also after an exception."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """The metadata of the step. Raises RuntimeError: no step is under way."""
        if self._connector_metadata is None:
            raise RuntimeError("there is no connector metadata between steps")
        return self._connector_metadata

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: B027
        """Called before the step or a load overwrites freed blocks."""

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads of the step. Called before the forward pass, also in steps without one."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the synchronous loads of a layer. Called for all layers after `start_load_kv`."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Start saving KV of a layer. Called for all layers once the KV of the step is final."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Wait for the saves of the step. Called after `save_kv_layer` of all layers."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests with blocks that are sent, of those that `request_finished` holds; and those that are loaded, of
        the asynchronous ones."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded: at the latest in the step that ends the load."""
        return set()

    def shutdown(self) -> None:  # noqa: B027
        """Release all resources. Called on both sides."""

    # --- the scheduler side -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:  # noqa: B027
        """A request has arrived. A ValueError refuses it."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded after those that have KV, and whether they are loaded asynchronously: then the
        request waits until `get_finished` reports it. None: not known yet; called again."""

    @abstractmethod
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A request has got its blocks, and ``num_external_tokens`` are loaded into them. Called again, with 0, once an
        asynchronous load has ended."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The metadata of a step for the workers. Called for every step."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """Transfers have ended on all ranks."""

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks stay held until `get_finished` reports it as sent, and the
        ``kv_transfer_params`` of its output."""
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Events since the last call. They are logged at level DEBUG."""
        return ()

    def reset_cache(self) -> bool | None:
        """The weights have changed: KV saved so far must not be loaded. A class without this method loads nothing from
        then on."""
        return None


KVConnectorBase = KVConnectorBase_V1
"""vLLM's other name."""
UNSUPPORTED_METHODS: Mapping[str, str] = {
    "get_handshake_metadata": "workers exchange no metadata with the scheduler at the start",
    "set_xfer_handshake_metadata": "workers exchange no metadata with the scheduler at the start",
    "build_connector_worker_meta": "workers report what get_finished returns",
    "get_finished_count": "every rank reports each transfer",
    "bind_gpu_block_pool": "the block pool is the scheduler's alone",
}
"""Methods of vLLM's that are not called -> why; a class that has one is refused."""

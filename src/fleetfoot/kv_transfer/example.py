"""A connector with vLLM's base class: the KV of prompts in files, for later runs and other engines.

It is an example: every prompt is a file on each rank, which is written and read while the engine waits.
`SharedStorageConnector` shares blocks between prompts and transfers them beside the steps.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfoot.kv_transfer.base.connector import warn_of_unused_fields
from fleetfoot.kv_transfer.vllm.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

if TYPE_CHECKING:
    import torch

    from fleetfoot.kv_transfer.vllm.records import (
        AttentionMetadata,
        ForwardContext,
        KVCacheBlocks,
        KVCacheConfig,
        Request,
        SchedulerOutput,
        VllmConfig,
    )

logger = logging.getLogger(__name__)
_PATH = "shared_storage_path"


@dataclass
class StoredPrompt:
    """A prompt in a step, without the tokens after its last full block."""

    key: str
    """The chain hash of its last block: of the tokens, and of the salt of the request."""
    block_ids: list[int]
    """Blocks to save, or to load."""
    first: int = 0
    """Number of the first of them in the prompt."""


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    """The prompts that a step loads and saves."""

    folder: str
    loads: list[StoredPrompt] = field(default_factory=list)
    saves: list[StoredPrompt] = field(default_factory=list)


class ExampleConnector(KVConnectorBase_V1):
    """Setting: ``shared_storage_path``, a folder, created when needed.

    One file for each prompt and rank: ``<path>/<fingerprint>/<key>/tp<T>-pp<P>-rank<R>.safetensors``, with a tensor
    ``[2, num_blocks, block_size, num_kv_heads, head_dim]`` for each layer of the rank.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._block_size = vllm_config.cache_config.block_size
        self._root = Path(self._kv_transfer_config.get_from_extra_config(_PATH, None))
        self._epoch = vllm_config.compute_hash() if role is KVConnectorRole.SCHEDULER else ""
        shape = f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
        self._file_names = [f"{shape}-rank{rank}.safetensors" for rank in range(parallel.world_size)]
        self._file_name = self._file_names[parallel.rank]
        # the scheduler side
        self._prompts: dict[str, tuple[Request, list[int]]] = {}  # that are not saved yet, with their blocks
        self._matched: dict[str, tuple[int, int]] = {}  # request -> first and last block that can be loaded
        self._loads: list[StoredPrompt] = []
        # the worker side
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._saving: dict[str, dict[str, torch.Tensor]] = {}
        self._invalid_block_ids: set[int] = set()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        return "NHD"

    @classmethod
    def check_settings(cls, vllm_config: VllmConfig) -> None:
        warn_of_unused_fields(vllm_config.kv_transfer_config)
        settings = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        path = settings.pop(_PATH, None)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ValueError(f"kv_connector_extra_config of ExampleConnector: {_PATH} is {path!r}; it must be a folder")
        if settings:
            raise TypeError(f"kv_connector_extra_config of ExampleConnector has {', '.join(settings)}; it has {_PATH}")

    # --- the scheduler side -----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens of the longest stored prefix; it is loaded synchronously."""
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        first, last = num_computed_tokens // self._block_size, (request.num_tokens - 1) // self._block_size
        while last > first and not self._is_stored(request.block_hashes[last - 1].hex()):
            last -= 1
        self._matched[request.request_id] = first, last
        return max(0, last - first) * self._block_size, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        (block_ids,) = blocks.get_block_ids()
        if num_external_tokens:
            first, last = self._matched.pop(request.request_id)
            self._loads.append(StoredPrompt(request.block_hashes[last - 1].hex(), block_ids[first:last], first))
        if self._kv_transfer_config.is_kv_producer:
            self._prompts[request.request_id] = request, block_ids

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        metadata = ExampleConnectorMetadata(str(self._root / self._epoch), self._loads)
        self._loads = []
        running = scheduler_output.scheduled_cached_reqs
        num_computed = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        num_computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for request_id, count in num_computed.items():
            request, block_ids = self._prompts.get(request_id, (None, []))
            if request is None:
                continue
            num_blocks = (request.num_prompt_tokens - 1) // self._block_size
            num_with_kv = count + scheduler_output.num_scheduled_tokens[request_id]
            if num_with_kv < num_blocks * self._block_size:
                continue  # a later chunk of the prompt completes it
            del self._prompts[request_id]
            if num_blocks and not self._is_stored(key := request.block_hashes[num_blocks - 1].hex()):
                metadata.saves.append(StoredPrompt(key, block_ids[:num_blocks]))
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._prompts.pop(request.request_id, None)
        self._matched.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Begin a new folder. Requests that began before are not saved."""
        self._epoch = f"{self._vllm_config.compute_hash()}-{secrets.token_hex(8)}"
        self._prompts.clear()
        return True

    def _is_stored(self, key: str) -> bool:
        folder = self._root / self._epoch / key
        return all((folder / name).exists() for name in self._file_names)

    # --- the worker side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        for prompt in metadata.loads:
            path = Path(metadata.folder, prompt.key, self._file_name)
            try:
                self._load(path, prompt)
            except Exception as error:
                logger.warning("%s cannot be loaded: %s", path, error)
                self._invalid_block_ids.update(prompt.block_ids)
                with suppress(OSError):
                    path.unlink()  # so that it is written again

    def _load(self, path: Path, prompt: StoredPrompt) -> None:
        """Raises OSError, SafetensorError, ValueError: the file is missing, incomplete, or of another shape."""
        from safetensors.torch import load_file

        stored = load_file(path)
        num_blocks = prompt.first + len(prompt.block_ids)
        for name, kv_cache in self._kv_caches.items():
            layer, shape = stored.get(name), (2, num_blocks, *kv_cache.shape[2:])
            if layer is None or layer.shape != shape or layer.dtype != kv_cache.dtype:
                found = "nothing" if layer is None else f"{layer.dtype} {tuple(layer.shape)}"
                raise ValueError(f"{name} must be {kv_cache.dtype} {shape}, and it is {found}")
            kv_cache[:, prompt.block_ids] = layer[:, prompt.first :].to(kv_cache.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """`start_load_kv` has waited."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        for prompt in metadata.saves:
            blocks = kv_layer[:, prompt.block_ids]  # [2, num_blocks, block_size, num_kv_heads, head_dim]
            self._saving.setdefault(prompt.key, {})[layer_name] = blocks.cpu().contiguous()

    def wait_for_save(self) -> None:
        """Write the files, each under a temporary name first: a reader sees all of it or nothing."""
        from safetensors.torch import save_file

        metadata, saving = self._get_connector_metadata(), self._saving
        assert isinstance(metadata, ExampleConnectorMetadata)
        self._saving = {}
        for key, layers in saving.items():
            path = Path(metadata.folder, key, self._file_name)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
            save_file(layers, temporary)
            temporary.replace(path)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._invalid_block_ids = self._invalid_block_ids, set()
        return failed

"""What the methods of vLLM's connectors get: this engine's records, with vLLM's names of attributes. No torch.

A connector reads them and must not change them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.sharding import num_kv_heads, pipeline_layers
from fleetfoot.kv_transfer.base.connector import KVTransferConfig, TransferContext
from fleetfoot.records import request as records

if TYPE_CHECKING:
    import torch

    from fleetfoot.config.model import AttentionSpec, ModelConfig


class RequestStatus(enum.Enum):
    """vLLM's names of `fleetfoot.records.request.RequestStatus`."""

    WAITING = records.RequestStatus.WAITING
    RUNNING = records.RequestStatus.RUNNING
    PREEMPTED = records.RequestStatus.PREEMPTED
    WAITING_FOR_REMOTE_KVS = records.RequestStatus.LOADING
    FINISHED_STOPPED = records.RequestStatus.FINISHED_STOPPED
    FINISHED_LENGTH_CAPPED = records.RequestStatus.FINISHED_LENGTH
    FINISHED_ABORTED = records.RequestStatus.FINISHED_ABORTED
    FINISHED_ERROR = records.RequestStatus.FINISHED_ERROR

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        return status.value >= records.RequestStatus.FINISHED_STOPPED


class Request:
    """A request of the scheduler. Those in ``live`` change with it; ``num_computed_tokens`` includes queued steps."""

    lora_request = prompt_embeds = None
    client_index = 0
    live: ClassVar[Mapping[str, str]] = {
        "num_computed_tokens": "num_computed",
        **{name: name for name in ("num_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")},
        "stop_reason": "stop_reason",
    }
    """vLLM's name -> that of `fleetfoot.records.request.Request`."""

    def __init__(self, request: records.Request) -> None:
        self._request = request
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sampling_params = request.params
        self.pooling_params = request.pooling_params
        self.max_tokens = request.max_tokens
        self.priority = request.priority
        self.cache_salt = request.cache_salt
        self.kv_transfer_params = request.kv_transfer_params
        self.mm_features: list[Any] = []
        self.block_hashes = request.block_hashes
        """Chain hashes of the full blocks; they depend on ``cache_salt``."""

    def __getattr__(self, name: str) -> Any:
        if name not in self.live:
            raise AttributeError(f"a request has no {name!r} here", name=name, obj=self)
        return getattr(self._request, self.live[name])

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        return self._request.prompt_token_ids.tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return list(self._request.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self._request.token_ids.tolist()

    @property
    def status(self) -> RequestStatus:
        return RequestStatus(min(self._request.status, records.RequestStatus.FINISHED_ERROR))

    def is_finished(self) -> bool:
        return self._request.is_finished

    def get_finished_reason(self) -> str | None:
        return self._request.finish_reason


@dataclass(frozen=True, slots=True)
class KVCacheBlock:
    """A KV block."""

    block_id: int


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """The blocks of a request. There is one group of KV caches."""

    block_ids: list[int]
    num_hits: int = 0
    """Blocks at the beginning that were found in the prefix cache."""

    @property
    def blocks(self) -> tuple[list[KVCacheBlock]]:
        return ([KVCacheBlock(block) for block in self.block_ids],)

    def get_block_ids(self) -> tuple[list[int]]:
        return (list(self.block_ids),)

    def get_unhashed_block_ids(self) -> list[int]:
        """The blocks without known contents: those after the prefix hits."""
        return self.block_ids[self.num_hits :]


# --- a step ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NewRequestData:
    """A request in its first step."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int]]
    num_computed_tokens: int
    """Tokens with KV before this step; those that it loads are included."""
    sampling_params: Any
    pooling_params: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: None = None
    prompt_embeds: None = None


@dataclass(slots=True)
class CachedRequestData:
    """Requests of earlier steps, in lists of equal lengths."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    """Preempted ones that begin again; their ``new_block_ids`` are all of their blocks."""
    new_block_ids: list[tuple[list[int]] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    """Empty: tokens do not travel with a step."""
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """All tokens of the resumed requests."""

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def resumed_from_preemption(self) -> list[bool]:
        return [req_id in self.resumed_req_ids for req_id in self.req_ids]

    def add(self, request: Request, num_computed: int, new_block_ids: list[int] | None, *, is_resumed: bool) -> None:
        self.req_ids.append(request.request_id)
        self.new_block_ids.append(None if new_block_ids is None else (new_block_ids,))
        self.num_computed_tokens.append(num_computed)
        self.num_output_tokens.append(request.num_output_tokens)
        if is_resumed:
            self.resumed_req_ids.add(request.request_id)
            self.all_token_ids[request.request_id] = request.all_token_ids


@dataclass(slots=True)
class SchedulerOutput:
    """A step. A request with a synchronous load is in the step that loads, with 0 scheduled tokens, and in the
    following ones as a request of an earlier step."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    """-1 for each draft: they are not on the host."""
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    num_common_prefix_blocks: list[int] = field(default_factory=list)
    free_encoder_mm_hashes: list[str] = field(default_factory=list)
    kv_connector_metadata: Any = None


@dataclass(slots=True)
class KVConnectorOutput:
    """Transfers that have ended on all ranks."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    """Asynchronous loads."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """The blocks of loads that have failed on a rank."""
    kv_connector_stats: None = None
    kv_cache_events: None = None


class AttentionMetadata:
    """The batch of a step, on the device of the KV cache. ``queries``: for each request the position of its first token
    in this step, the number of its tokens, and the blocks from the one of that position on."""

    def __init__(self, queries: list[tuple[int, int, list[int]]], block_size: int, device: torch.device) -> None:
        self._queries, self._block_size, self._device = queries, block_size, device
        self.num_reqs = len(queries)
        self.num_actual_tokens = sum(count for _, count, _ in queries)
        self.max_query_len = max((count for _, count, _ in queries), default=0)
        self.max_seq_len = max((start + count for start, count, _ in queries), default=0)

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """``[num_actual_tokens]`` int64: block id * block_size + offset; -1 for drafts beyond a request's end, which
        have no KV."""
        slots, size = [], self._block_size
        for start, count, blocks in self._queries:
            for offset in range(start % size, start % size + count):
                block = offset // size
                slots.append(blocks[block] * size + offset % size if block < len(blocks) else -1)
        return self._tensor(slots)

    @cached_property
    def query_start_loc(self) -> torch.Tensor:
        """``[num_reqs + 1]`` int64."""
        starts = [0]
        for _, count, _ in self._queries:
            starts.append(starts[-1] + count)
        return self._tensor(starts)

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """``[num_reqs]`` int64: tokens with KV after the step."""
        return self._tensor([start + count for start, count, _ in self._queries])

    def _tensor(self, values: list[int]) -> torch.Tensor:
        import torch

        return torch.tensor(values, dtype=torch.int64, device=self._device)


class MLACommonMetadata(AttentionMetadata):
    """No batch is one: there is no multi-head latent attention."""


class TritonAttentionMetadata(AttentionMetadata):
    """No batch is one: KV has the layout of the connector, whatever kernels read it."""


@dataclass(slots=True)
class ForwardContext:
    """A step, for the worker side."""

    attn_metadata: Any
    """Name of a layer -> `AttentionMetadata`, which is the same for all."""
    no_compile_layers: Mapping[str, Any]
    """Name of a layer -> an object with ``kv_cache``, a list of the layer's KV cache."""
    virtual_engine: int = 0


# --- the engine -----------------------------------------------------------------------------------------------------


class Facts(SimpleNamespace):
    """Attributes of a config of vLLM's, those that mean something here."""

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(self.__dict__)
        raise AttributeError(f"{type(self).__name__} has no {name!r} here; it has {known}", name=name, obj=self)


class ConnectorModelConfig(Facts):
    """vLLM's ``model_config``."""

    use_mla = is_encoder_decoder = False
    checkpoint: ModelConfig | None

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype_name)

    def get_num_layers(self, parallel_config: Facts) -> int:
        """On the rank of ``parallel_config``."""
        return len(layers_of(self.shape, parallel_config))

    def get_total_num_hidden_layers(self) -> int:
        return self.shape.num_layers

    def get_num_kv_heads(self, parallel_config: Facts) -> int:
        """On each rank."""
        return num_kv_heads(self._mixer, parallel_config.tensor_parallel_size)

    def get_total_num_kv_heads(self) -> int:
        return self._mixer.num_kv_heads

    def get_num_attention_heads(self, parallel_config: Facts) -> int:
        """On each rank."""
        return self._mixer.num_heads // parallel_config.tensor_parallel_size

    def get_head_size(self) -> int:
        return self._mixer.head_dim

    def get_hidden_size(self) -> int:
        return self.shape.hidden_size

    def get_vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def _mixer(self) -> AttentionSpec:
        """The first layer's, as in vLLM: where layers differ, a connector reads the shapes of the tensors."""
        return self.shape.layers[0].mixer

    @property
    def shape(self) -> ModelConfig:
        """Raises ValueError: the model has not been read yet."""
        if self.checkpoint is None:
            raise ValueError("the model's shape is not known yet when a connector names its KV layout")
        return self.checkpoint


class VllmConfig(Facts):
    """The engine's settings by vLLM's names: ``kv_transfer_config``, ``cache_config``, ``model_config``,
    ``parallel_config``, ``scheduler_config``, ``instance_id``."""

    kv_transfer_config: KVTransferConfig
    lora_config = speculative_config = kv_events_config = None

    def compute_hash(self) -> str:
        """The engine's fingerprint: KV may only be exchanged between engines with the same. Raises ValueError: it is
        not known before the engine starts."""
        if self.context is None:
            raise ValueError("the fingerprint is not known before the engine starts")
        return str(self.context.fingerprint)

    @classmethod
    def of_context(cls, context: TransferContext) -> VllmConfig:
        """What one side of a connector gets."""
        assert context.engine is not None
        config = cls.of_settings(dataclasses.replace(context.config, engine_id=context.engine_id), context.engine)
        config.context = context
        config.cache_config.num_gpu_blocks = context.num_blocks
        config.parallel_config.rank = context.rank
        config.model_config.checkpoint, config.model_config.dtype_name = context.model, context.dtype
        for part in (config.model_config, config.scheduler_config):
            part.max_model_len = context.max_model_len
        config.scheduler_config.max_num_batched_tokens = context.max_num_batched_tokens
        return config

    @classmethod
    def of_settings(cls, transfer: KVTransferConfig, engine: EngineConfig) -> VllmConfig:
        """What is known before the model is read."""

        def part(names: str, kind: type[Facts] = Facts, **others: Any) -> Facts:
            return kind(**{name: getattr(engine, name) for name in names.split()}, **others)

        return cls(
            kv_transfer_config=transfer,
            cache_config=part(
                "block_size enable_prefix_caching gpu_memory_utilization",
                num_gpu_blocks=engine.num_gpu_blocks_override,
                cache_dtype="auto",
            ),
            model_config=part(
                "model max_model_len quantization seed",
                ConnectorModelConfig,
                tokenizer=engine.tokenizer or engine.model,
                dtype_name=engine.dtype,
                checkpoint=None,
            ),
            parallel_config=part(
                "tensor_parallel_size pipeline_parallel_size world_size nnodes",
                rank=0,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_rank_local=0,
            ),
            scheduler_config=part(
                "max_num_batched_tokens max_num_seqs max_model_len enable_chunked_prefill",
                policy=engine.scheduling_policy,
            ),
            instance_id=transfer.engine_id,
            context=None,
        )


def layers_of(model: ModelConfig, parallel_config: Facts) -> range:
    """The decoder layers on a rank."""
    stage = parallel_config.rank // parallel_config.tensor_parallel_size
    return pipeline_layers(model, stage, parallel_config.pipeline_parallel_size)


def layer_names(layers: range) -> list[str]:
    """vLLM's names of the attention of layers; a drafter's layers are numbered after the model's."""
    return [f"model.layers.{layer}.self_attn.attn" for layer in layers]


class KVCacheGroupSpec(Facts):
    """Layers with the same blocks: ``layer_names``, ``kv_cache_spec`` with ``block_size``."""


class KVCacheConfig(Facts):
    """The KV cache: ``num_blocks``, ``kv_cache_groups`` with one group."""

    @classmethod
    def of(cls, num_blocks: int, block_size: int, layer_names: list[str]) -> KVCacheConfig:
        group = KVCacheGroupSpec(layer_names=layer_names, kv_cache_spec=Facts(block_size=block_size))
        return cls(num_blocks=num_blocks, kv_cache_groups=[group])

"""All settings of an engine. CLI flags and ``LLM`` keywords are derived from the fields."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

from fleetfoot.compat.names import ENGINE_KEYWORDS, check_engine_keyword, replicas_here
from fleetfoot.config import env
from fleetfoot.config.eplb import EPLBConfig
from fleetfoot.config.json_fields import ABOVE_ZERO, Bounds, JSONSettings, check_fields
from fleetfoot.config.kv_events import KVEventsConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.config.model import GenerationOverride, HFConfig
from fleetfoot.config.pooling import PoolerConfig
from fleetfoot.config.profiler import ProfilerConfig
from fleetfoot.config.sharding import ExpertSplit
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.config.weight_transfer import WeightTransferConfig
from fleetfoot.utils.cluster_key import ClusterKey, find_cluster_key
from fleetfoot.utils.validation import FieldError, FieldTypeError, is_host, is_loopback, unknown_keyword

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
StateDtype = Literal["auto", "float32", "bfloat16", "float16"]
KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Values of ``kv_cache_dtype`` -> the dtype of the KV cache; with others it is that of weights and activations."""
LoadFormat = Literal["auto", "safetensors", "dummy"]
ModelRunnerName = Literal["auto", "v1", "v2"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify", "reward"]
Task = Literal["auto", "generate", "embed", "embedding", "classify", "score", "reward", "encode"]
SchedulingPolicy = Literal["fcfs", "priority"]
MAX_RESTARTS = 16
"""The default of ``max_restarts``."""
ExecutorBackend = Literal["auto", "uni", "mp", "ray"]
OnError = Literal["raise", "restart"]

EMBEDDED_MODEL = "story-llama"
"""The name of the model in the package; the default of ``model``."""

UNSUPPORTED = {
    "quantization", "enable_lora", "enable_prompt_embeds", "prefill_context_parallel_size",
}  # fmt: skip
"""Settings of which the runners support the default alone: the oracle refuses others, and --help does not show them."""
_SYNONYMS = {
    "dtype": {"half": "float16", "float": "float32"},
    "task": {"": "auto"},
    "convert": {"": "auto"},
}
"""vLLM's other names of values."""

_OFFLOADING_GIB = 1 << 33  # from here on the number of bytes does not fit in 64 bits


class CompilationMode(enum.IntEnum):
    """vLLM's modes, those that there are."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1


@dataclass(frozen=True, slots=True)
class CompilationConfig(JSONSettings):
    """``--compilation-config``; names as in vLLM."""

    setting: ClassVar[str] = "compilation_config"
    neutral: ClassVar[Mapping[str, Any]] = {"backend": "inductor"}
    advice: ClassVar[Mapping[str, str]] = {
        "backend": "leave it out: the backend is inductor",
        "level": "it is mode",
        "cudagraph_mode": "leave it out: Model Runner V2 captures graphs, and enforce_eager turns them off",
    }

    mode: str | int = "NONE"
    """A `CompilationMode`, given by name or number, stored as the name."""

    def __post_init__(self) -> None:
        for mode in CompilationMode:
            if self.mode == mode.name or (self.mode == mode and not isinstance(self.mode, bool)):
                object.__setattr__(self, "mode", mode.name)
                return
        known = ", ".join(f"{mode.value} or {mode.name}" for mode in CompilationMode)
        raise ValueError(f"compilation_config: mode is {self.mode!r}; it can be {known}")


class ProcessorNames:
    """``logits_processors``."""

    metavar = "NAMES"

    @staticmethod
    def parse(value: Any) -> tuple[Any, ...]:
        """Classes or names of classes. Raises TypeError: the value is neither a list nor comma-separated names."""
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",")]
        if not isinstance(value, list | tuple) or not all(isinstance(item, type | str) and item for item in value):
            raise FieldTypeError(
                "logits_processors", f"is {value!r}; it must be a list of classes or of 'module:Class' names", value
            )
        return tuple(value)


def _flag(
    default: Any, help: str, *, choices: Any = None, record: Any = None, is_hashed: bool | None = None, **checks: Any
) -> Any:
    """A field with its documentation, which is also the CLI's help text.

    Args:
        choices: a Literal type of the allowed values.
        record: a class with a ``parse`` method for dictionaries and JSON text.
        checks: see `check_fields`.
    """
    metadata = {"help": help, **checks}
    if choices is not None:
        metadata["choices"] = get_args(choices)
    if record is not None:
        metadata["record"] = record
    return field(default=default, metadata=metadata, hash=is_hashed)


def _count(default: int | None, help: str) -> Any:
    """A field of at least 1."""
    return _flag(default, help, bounds=Bounds("be at least 1", 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of one engine. Every field has a flag of the same name with dashes and an ``LLM`` keyword.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and what would work.
        TypeError: a value has the wrong type, or (in `from_keywords`) a keyword is unknown.
    """

    model: str = _flag(EMBEDDED_MODEL, "a checkpoint folder or a hub id; without it the embedded model runs")
    tokenizer: str | None = _flag(None, "a folder or hub id with tokenizer.json, if not the model's own")
    revision: str | None = _flag(None, "branch, tag or commit of a hub id")
    device: Device = _flag("auto", "where to run: auto takes a GPU if there is one", choices=Device)
    dtype: Dtype = _flag("auto", "of weights and KV: auto takes the checkpoint's own", choices=Dtype)
    load_format: LoadFormat = _flag("auto", "dummy makes random weights from config.json alone", choices=LoadFormat)
    skip_tokenizer_init: bool = _flag(False, "run on token ids, without a tokenizer")
    trust_remote_code: bool = _flag(False, "accepted for compatibility: code from a checkpoint is never run")
    runner: Runner = _flag(
        "auto", "what the model computes: text, or vectors and scores (pooling); auto: by its config", choices=Runner
    )
    task: Task = _flag("auto", "what the checkpoint must be for, which selects the runner", choices=Task)
    convert: Convert = _flag("auto", "the same by vLLM's later name: checkpoints are not converted", choices=Convert)
    pooler_config: PoolerConfig | None = _flag(
        None,
        "JSON: pooling_type (LAST, MEAN, CLS, STEP, ALL), use_activation, dimensions",
        record=PoolerConfig,
    )
    quantization: str | None = _flag(
        None,
        "how weights are quantized, fp8 for instance; default: not at all",
        if_empty="leave it out for weights that are not quantized",
    )
    enable_lora: bool = _flag(False, "serve LoRA adapters beside the model")
    enable_prompt_embeds: bool = _flag(False, "take prompts as embeddings too")

    hf_overrides: Any = _flag(
        None,
        "JSON: fields in place of those of config.json; in Python also a function of them",
        record=HFConfig,
        is_hashed=False,
    )
    generation_config: str = _flag(
        "auto",
        "where sampling defaults come from: auto, the model's generation_config.json if it has one; none, the engine's "
        "own defaults (vllm means the same); or a folder with that file",
        if_empty="it can be 'auto', 'none' or a folder",
    )
    override_generation_config: dict[str, Any] | None = _flag(
        None,
        "JSON: sampling defaults in place of the file's (temperature, top_p, top_k, min_p, repetition_penalty, "
        "max_new_tokens)",
        record=GenerationOverride,
        is_hashed=False,
    )

    model_runner: ModelRunnerName = _flag(
        "auto", "which model runner: auto lets the oracle choose", choices=ModelRunnerName
    )
    use_v2_model_runner: bool | None = _flag(
        None, "Model Runner V2, or V1; default: FLEETFOOT_USE_V2_MODEL_RUNNER (0 or 1) if it is set, else the oracle"
    )
    async_scheduling: bool | None = _flag(
        None, "schedule step N+1 while the device runs step N; default: where the device is not the host itself"
    )
    enforce_eager: bool = _flag(False, "never capture or replay graphs")
    compilation_config: CompilationConfig | None = _flag(
        None,
        "JSON: mode (0 or NONE; 1 or STOCK_TORCH_COMPILE: torch.compile, on V1)",
        record=CompilationConfig,
    )
    speculative_config: SpeculativeConfig | None = _flag(
        None,
        "JSON: method (ngram, draft_model, eagle, mtp), num_speculative_tokens, model, prompt_lookup_max",
        record=SpeculativeConfig,
    )
    seed: int = _flag(
        0,
        "of everything random that a request does not seed itself",
        bounds=Bounds("fit in 64 bits", -(2**63), 2**64 - 1),
    )

    max_model_len: int | None = _flag(
        None,
        "longest prompt plus output, in tokens; default: the model's own limit",
        bounds=Bounds("be at least 2, a token of prompt and one of output", 2),
    )
    max_num_seqs: int = _count(256, "most requests that run at the same time")
    max_num_batched_tokens: int | None = _count(None, "most tokens in one step; default 8192 on a GPU, 2048 on a CPU")
    enable_chunked_prefill: bool = _flag(True, "split long prompts over several steps, mixed with decodes")
    enable_prefix_caching: bool = _flag(True, "reuse the KV blocks of a prompt's known beginning")
    scheduling_policy: SchedulingPolicy = _flag(
        "fcfs", "fcfs: first come, first served; priority: lower values first", choices=SchedulingPolicy
    )
    logits_processors: tuple[Any, ...] = _flag(
        (), "LogitsProcessor classes as module:Class, with commas between them; they run on V1", record=ProcessorNames
    )
    max_logprobs: int = _flag(
        20, "most logprobs of one position; -1: no limit", bounds=Bounds("be -1 (no limit), 0 or more", -1)
    )

    block_size: int = _count(16, "tokens in a KV block")
    kv_cache_dtype: KVCacheDtype = _flag(
        "auto",
        "of KV: auto takes that of weights and activations; fp8 (e4m3) and fp8_e5m2 take a byte for each element",
        choices=KVCacheDtype,
    )
    mamba_ssm_cache_dtype: StateDtype = _flag(
        "auto", "of recurrent states, of gated delta nets as of Mamba-2: auto is float32", choices=StateDtype
    )
    max_state_snapshots: int | None = _count(None, "most recurrent states in the prefix cache; default: what fits")
    gpu_memory_utilization: float = _flag(
        0.9,
        "share of the GPU's memory for weights, KV and activations together",
        bounds=Bounds("be above 0, at most 1", ABOVE_ZERO, 1),
    )
    kv_cache_memory_bytes: int | None = _count(None, "bytes for KV, instead of what the memory plan finds")
    num_gpu_blocks_override: int | None = _count(None, "number of KV blocks on any device, instead of the plan's")

    kv_transfer_config: KVTransferConfig | None = _flag(
        None,
        "JSON: kv_connector, kv_role (kv_producer, kv_consumer, kv_both), kv_connector_extra_config, "
        "kv_connector_module_path; without a connector and a role it is not active",
        record=KVTransferConfig,
    )
    kv_events_config: KVEventsConfig | None = _flag(
        None,
        "JSON: enable_kv_cache_events, endpoint (tcp://127.0.0.1:5557), replay_endpoint, topic, hash_key: publish "
        "which KV blocks there are",
        record=KVEventsConfig,
    )
    weight_transfer_config: WeightTransferConfig | None = _flag(
        None,
        "JSON: backend (auto, nccl, gloo, ipc) of weights from a trainer; check_finite",
        record=WeightTransferConfig,
    )
    kv_offloading_size: float | None = _flag(
        None,
        "GiB of CPU memory that KV blocks move to when the GPU's run out",
        bounds=Bounds(f"be above 0, in GiB (less than {_OFFLOADING_GIB:,})", ABOVE_ZERO, _OFFLOADING_GIB - 1),
    )
    enable_sleep_mode: bool = _flag(False, "let sleep() give the memory of weights and KV back until wake_up()")

    profiler_config: ProfilerConfig | None = _flag(
        None, "JSON: profiler (torch), torch_profiler_dir: where start_profile and stop_profile write traces",
        record=ProfilerConfig,
    )  # fmt: skip

    tensor_parallel_size: int = _count(1, "GPUs that share each layer")
    pipeline_parallel_size: int = _count(1, "GPUs that the layers are spread over")
    data_parallel_size: int = _count(
        1, "replicas, each with GPUs and a KV cache of its own; with enable_expert_parallel they share experts"
    )
    enable_expert_parallel: bool = _flag(
        False, "give each rank whole experts, instead of a part of each: those of a layer are spread over the ranks"
    )
    enable_eplb: bool = _flag(
        False, "with enable_expert_parallel, move experts between ranks by their load, and copy those with the most"
    )
    eplb_config: EPLBConfig | None = _flag(
        None,
        "JSON: window_size, step_interval, num_redundant_experts, log_balancedness, log_balancedness_interval, "
        "load_initial and save (folders)",
        record=EPLBConfig,
    )
    prefill_context_parallel_size: int = _count(1, "GPUs that share a long prompt")
    distributed_executor_backend: ExecutorBackend = _flag(
        "auto",
        "where workers run: uni, in the engine's process; mp, each in its own; ray: on a Ray cluster; auto: mp where "
        "there are several",
        choices=ExecutorBackend,
    )
    nnodes: int = _count(1, "machines that the workers are spread over, equally many on each")
    node_rank: int = _flag(0, "number of this machine; the engine starts on 0, the others run fleetfoot worker")
    master_addr: str = _flag(
        "127.0.0.1", "address of machine 0, as the others reach it", if_empty="it must be the address of node 0"
    )
    master_port: int = _flag(
        29500, "port at which machine 0 waits for the others", bounds=Bounds("be 1 to 65535", 1, 65535)
    )
    trusted_network: bool = _flag(
        False,
        "acknowledge that NCCL and gloo between machines neither authenticate nor encrypt; needed on any address but "
        "loopback",
    )
    cluster_key_file: str | None = _flag(
        None,
        "file (mode 0600) with the secret that processes of a deployment share; default: FLEETFOOT_CLUSTER_KEY, or on "
        "loopback a file that is made",
        if_empty="it must be a path, or left out",
    )

    on_error: OnError = _flag(
        "raise",
        "after an error of a step: raise, end the engine and every request with it; restart, rebuild the workers and "
        "resume the requests",
        choices=OnError,
    )
    max_restarts: int | None = _count(
        None, "with on_error restart, most restarts within an hour; one more error ends the engine; default 16"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            record, value = item.metadata.get("record"), plain_value(item.name, getattr(self, item.name))
            value = value if record is None or value is None else record.parse(value)
            object.__setattr__(self, item.name, value)
        if self.runner in ("v1", "v2"):
            raise FieldError(
                "runner",
                f"is {self.runner!r}; it can be {', '.join(get_args(Runner))}; the model runner is model_runner",
                self.runner,
            )
        check_fields(self)
        for name, value in (("task", self.task), ("convert", self.convert)):
            if value in ("auto", "none"):
                continue
            runner: Runner = "generate" if value == "generate" else "pooling"
            if self.runner not in ("auto", runner):
                raise FieldError(name, f"is {value!r}, and runner is {self.runner!r}; leave one of them out", value)
            object.__setattr__(self, "runner", runner)
        if self.use_v2_model_runner is not None and self.model_runner == ("v1" if self.use_v2_model_runner else "v2"):
            raise FieldError(
                "model_runner",
                f"is {self.model_runner!r} and use_v2_model_runner is {self.use_v2_model_runner}: they "
                "contradict each other; leave one of them out",
                self.model_runner,
            )
        if (events := self.kv_events_config) is not None and events.is_active and not self.enable_prefix_caching:
            raise FieldError("kv_events_config", "is of the prefix cache; set enable_prefix_caching", events)
        self._check_processes()
        self._check_experts()
        self._check_batched_tokens()

    model_config = scheduler_config = cache_config = parallel_config = property(lambda self: self)
    """vLLM's groups of settings, for a `LogitsProcessor` that reads ``vllm_config.scheduler_config.max_num_seqs``."""

    @property
    def compiles_layers(self) -> bool:
        """Whether ``torch.compile`` compiles the layers."""
        return self.compilation_config is not None and self.compilation_config.mode == "STOCK_TORCH_COMPILE"

    @property
    def world_size(self) -> int:
        """Workers of the engine, on all nodes."""
        return self.replica_size * self.num_data_ranks

    @property
    def replica_size(self) -> int:
        """Workers that hold one copy of all but the experts."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel ranks of one engine, which share experts and step together."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_replicas(self) -> int:
        """Engines that share nothing; one runs in this process."""
        return self.data_parallel_size // self.num_data_ranks

    @property
    def group_sizes(self) -> dict[str, int]:
        """The sizes of a worker's groups, by the names of `fleetfoot.distributed.groups.Groups`."""
        split = self.expert_split
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        return {**sizes, "expert": 1 if split is None else split.num_ranks, "data": self.num_data_ranks}

    @property
    def expert_split(self) -> ExpertSplit | None:
        """How experts are spread over ranks; None: each rank has a part of each."""
        num_ranks = self.tensor_parallel_size * self.num_data_ranks
        if not self.enable_expert_parallel or num_ranks == 1:
            return None
        eplb = self.eplb_config or EPLBConfig()
        redundant = eplb.num_redundant_experts if self.enable_eplb else 0
        return ExpertSplit(num_ranks, redundant, self.enable_eplb)

    @property
    def local_world_size(self) -> int:
        """Workers on each node."""
        return self.world_size // self.nnodes

    def find_cluster_key(self, *hosts: str) -> ClusterKey:
        """The key of the deployment, for processes that listen on ``hosts`` or connect to them. Raises ValueError."""
        return find_cluster_key(self.cluster_key_file, env.cluster_key(), hosts)

    def check_trusted(self, name: str, host: str) -> None:
        """Raise ValueError unless ``host``, which the setting ``name`` has, is on loopback, or the user trusts the
        network between machines."""
        if not (is_loopback(host) or self.trusted_network):
            raise FieldError(
                "trusted_network",
                f"is not set, and {name} is {host!r}: the traffic of NCCL and gloo between machines, "
                "weights and activations, is neither authenticated nor encrypted, and any process that reaches these "
                "machines could read or change it: use a network of its own, and acknowledge that with trusted_network "
                "(--trusted-network)",
                host,
            )

    @property
    def max_decode_tokens(self) -> int:
        """Tokens of the largest step of decodes alone: one and its drafts for each request."""
        drafts = 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens
        return self.max_num_seqs * (1 + drafts)

    def _check_batched_tokens(self) -> None:
        budget, width = self.max_num_batched_tokens, self.max_decode_tokens // self.max_num_seqs
        if budget is None or budget >= self.max_decode_tokens:
            return
        each = "one token" if width == 1 else f"{width} tokens, one and {width - 1} drafts,"
        fewer = f", or set max_num_seqs={budget // width}" if budget >= width else ""
        raise FieldError(
            "max_num_batched_tokens",
            f"is {budget}, but a step must hold {each} of each running request, up to "
            f"max_num_seqs ({self.max_num_seqs}): raise it to {self.max_decode_tokens}{fewer}",
            budget,
        )

    def _check_experts(self) -> None:
        if self.enable_eplb and self.expert_split is None:
            raise FieldError(
                "enable_eplb",
                "is set, and experts are not spread over ranks: set enable_expert_parallel, and tensor_parallel_size "
                "or data_parallel_size to more than 1",
                True,
            )
        if self.eplb_config is not None and not self.enable_eplb:
            raise FieldError(
                "eplb_config", "is given, but enable_eplb is not set; set it, or leave both out", self.eplb_config
            )

    def _check_processes(self) -> None:
        size, nodes = self.world_size, self.nnodes
        of_data = f" times data_parallel_size {self.num_data_ranks}" if self.num_data_ranks > 1 else ""
        sizes = (
            f"tensor_parallel_size {self.tensor_parallel_size} times pipeline_parallel_size "
            f"{self.pipeline_parallel_size}{of_data} is {size} {'worker' if size == 1 else 'workers'}"
        )
        if self.distributed_executor_backend == "uni" and size > 1:
            raise FieldError(
                "distributed_executor_backend",
                f"is 'uni', one worker in the engine's process, but {sizes}; set it to 'mp' or 'auto'",
            )
        if self.distributed_executor_backend == "ray" and nodes > 1:
            raise FieldError("nnodes", f"is {nodes}, and Ray places the workers; leave it out", nodes)
        if size % nodes:
            raise FieldError(
                "nnodes",
                f"is {nodes}, but {sizes}, which cannot be spread evenly over so many; it can be "
                f"{', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}",
                nodes,
            )
        if nodes > 1 and self.num_replicas > 1:
            raise FieldError(
                "nnodes",
                f"is {nodes}, and replicas that share nothing (data_parallel_size without enable_expert_parallel) are "
                "on one machine alone; start one engine on each, and a router before them",
                nodes,
            )
        if self.max_restarts is not None and self.on_error == "raise" and self.num_replicas == 1:
            raise FieldError(
                "max_restarts",
                f"is {self.max_restarts}, but on_error is 'raise'; set it to 'restart'",
                self.max_restarts,
            )
        if nodes > 1 and self.on_error == "restart":
            raise FieldError(
                "on_error", f"is 'restart', but nnodes is {nodes}; it can be 'restart' on one machine alone", nodes
            )
        if not 0 <= self.node_rank < nodes:
            others = f" to {nodes - 1}" if nodes > 1 else "; set nnodes to the number of machines"
            raise FieldError(
                "node_rank", f"is {self.node_rank}; with nnodes {nodes} it can be 0{others}", self.node_rank
            )
        if not is_host(self.master_addr):
            raise FieldError(
                "master_addr",
                f"is {self.master_addr!r}; it must be the name or the IPv4 address of node 0 and nothing "
                "else; the port is master_port",
                self.master_addr,
            )

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any], *, owner: str) -> EngineConfig:
        """Build from keyword arguments; None is a setting's default. Raises TypeError for an unknown one: names
        ``owner``, and near matches or advice."""
        known = [item.name for item in fields(cls)]
        keywords, first = replicas_here(keywords)
        for name, value in keywords.items():
            if name in ENGINE_KEYWORDS:
                check_engine_keyword(owner, name, value)
            elif name not in known:
                raise unknown_keyword(owner, name, known)
        config = cls(**{name: keywords[name] for name in known if keywords.get(name) is not None})
        if first and config.kv_events_config is not None:  # its ports and its number are those of the replica
            config = replace(config, kv_events_config=config.kv_events_config.moved(first))
        return config


VllmConfig = EngineConfig
"""vLLM's name of what a `LogitsProcessor` gets."""


def plain_value(name: str, value: Any) -> Any:
    """Convert paths and torch dtypes, which scripts may pass, to strings, and vLLM's other names of values."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "compilation_config" and str(value).isdecimal():
        return {"mode": int(value)}
    if type(value).__module__ == "torch" or isinstance(value, str):
        value = str(value).removeprefix("torch.") if name == "dtype" else value
        return _SYNONYMS.get(name, {}).get(value, value)
    return value

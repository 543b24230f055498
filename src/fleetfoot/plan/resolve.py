"""From settings, a model and a machine to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.engine import EMBEDDED_MODEL, KV_DTYPES, EngineConfig
from fleetfoot.config.json_fields import ConfigError, Fields
from fleetfoot.config.model import ModelConfig, read_config_json
from fleetfoot.config.model_registry import load_general_plugins
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.pooling import Pooling, classifier_tokens, is_bidirectional, is_pooling_model, resolve_pooling
from fleetfoot.config.quantization import choose_quantization
from fleetfoot.config.sharding import check_expert_split, check_pipeline_parallel_size, check_tensor_parallel_size
from fleetfoot.distributed.placement import read_placements
from fleetfoot.fusion import plan_fusion
from fleetfoot.kernels.interface import NO_LAYER_CHAIN
from fleetfoot.kernels.registry import DeviceFacts, plan_kernels, plan_whole_layers
from fleetfoot.kv_transfer.base.registry import names_connector
from fleetfoot.plan.connector import locate_connector
from fleetfoot.plan.fit import fit_engine
from fleetfoot.plan.forced_runner import forced_runners
from fleetfoot.plan.logits_processors import load_processors
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.memory import LEAST_TOKENS, EngineShape
from fleetfoot.plan.oracle import Decision, ModelFeatures, decide
from fleetfoot.plan.plan import EnginePlan, check_connector_settings, make_identity
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.methods import linear_methods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.kv_layout import ARENA
from fleetfoot.speculative.find import DrafterModel, drafter_shape, find_drafter
from fleetfoot.utils.validation import FieldError
from fleetfoot.weights.hub import resolve_model


def resolve_plan(
    config: EngineConfig, machine: Machine, *, environ: Mapping[str, str] | None = None, config_only: bool = False
) -> EnginePlan:
    """Decide everything that can be decided before any memory is taken.

    Args:
        environ: environment variables; None: the process's own, or what a block of code forces in their place.
        config_only: nothing will be loaded, so no more than ``config.json`` is downloaded, and no tokenizer.

    Raises:
        ValueError, TypeError: settings that do not go together, with the model or with the machine, or that a KV
            connector refuses.
        FileNotFoundError: there is no such model.
    """
    forced = next(forced_runners(), None) if environ is None else None
    load_general_plugins()
    model_path = find_model(config.model, config.revision, config_only=config_only)
    model = load_model_config(model_path, config.hf_overrides)
    device = machine.choose_device(config.device)
    content = read_config_json(model_path, config.hf_overrides)
    pooling = _pooling(config, content, model, model_path, config_only=config_only)
    if pooling is not None:
        config, model = _for_pooling(config, model, pooling)
    features = replace(ModelFeatures.of(content, model), task="generate" if pooling is None else "pooling")
    decision = decide(config, features, machine, environ if forced is None else forced.variables)
    if callable(config.hf_overrides):  # a worker process could not import it, and needs the result alone
        config = replace(config, hf_overrides=None)
    model = model.with_state_dtype(config.mamba_ssm_cache_dtype)
    model.check_snapshots(config.max_state_snapshots)
    found = find_drafter(config, model, model_path, config_only=config_only)
    _check_parts(config, model, found)
    shape = _engine_shape(config, model, found, decision, machine, device)
    if decision.logits_processors and config.speculative_config is not None:
        raise ValueError(
            "logits_processors is set, and so is speculative_config; the batches of LogitsProcessor classes have no "
            "drafts: leave one of them out"
        )
    _ = shape.max_num_batched_tokens  # settings that do not go together are refused first
    total = machine.memory_bytes(device)
    total //= config.world_size * config.num_replicas if device == "cpu" else 1  # ranks share a CPU's
    shape, memory = fit_engine(shape, total)
    asked = config.max_num_seqs
    if model.has_states and (most := memory.concurrency(LEAST_TOKENS, asked)) < asked:
        config = replace(config, max_num_seqs=max(1, most))  # all that may run have their states
        shape, memory = fit_engine(replace(shape, config=config), total)
    if found is not None:
        found.check_length(shape.max_model_len)
    overlaps = decision.runner == "v2" and device != "cpu"  # a CPU that computes cannot schedule at the same time
    drafter = shape.drafter
    if found is not None:
        found = replace(found, config=found.config.for_context(shape.max_model_len))
        drafter = replace(drafter, model=found)
    tokenizer_path = None if config_only else _tokenizer_path(config, model_path)
    plan = EnginePlan(
        config=config,
        machine=machine,
        model=_with_end_token(model, tokenizer_path).for_context(shape.max_model_len),
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        device=device,
        dtype=shape.dtype,
        decision=decision,
        asked_max_num_seqs=asked,
        kernels=shape.kernels,
        kv_layout=decision.kv_layout,
        max_model_len=shape.max_model_len,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        prompt_step_s=shape.prompt_step_s,
        async_scheduling=overlaps if config.async_scheduling is None else config.async_scheduling,
        capture_table=shape.capture_table,
        memory=memory,
        fusion=plan_fusion(model, decision.runner),
        layer_chain=shape.layer_chain,
        linear_methods=shape.linear_methods,
        expert_placements=_expert_placements(config, model),
        connector=locate_connector(decision.connector),
        drafter=drafter,
        pooling=pooling,
        logits_processors=load_processors(decision.logits_processors),
        drafter_fusion=() if found is None else plan_fusion(found.config, decision.runner),
        weights=make_identity(
            config,
            model_path,
            {"model": asdict(model), "dtype": shape.dtype, "device": device, "drafter": found and asdict(found.config)},
            None if found is None else found.folder,
            () if pooling is None else [projection.folder for projection in pooling.projections],
        ),
        executor=_executor(config, device),
    )
    if forced is not None:
        forced.check_plan(plan)
    check_connector_settings(plan)
    _check_gpu(plan)
    return plan


def _check_parts(config: EngineConfig, model: ModelConfig, drafter: DrafterModel | None) -> None:
    """Raises ValueError: the model cannot be divided so, or the drafter has states."""
    if drafter is not None and drafter.config.has_states:
        raise ConfigError(
            f"{drafter.config.architecture} has layers with recurrent states, which a drafter does not keep; take a "
            "draft model with attention in all layers"
        )
    if (split := config.expert_split) is not None:
        check_expert_split(model, split)
    check_tensor_parallel_size(model, config.tensor_parallel_size, shares_experts=split is None)
    check_pipeline_parallel_size(model, config.pipeline_parallel_size)


def _engine_shape(
    config: EngineConfig,
    model: ModelConfig,
    found: DrafterModel | None,
    decision: Decision,
    machine: Machine,
    device: str,
) -> EngineShape:
    """What memory is counted for. ``found``: the drafter's model. Raises ValueError: max_model_len is too large."""
    limit = model.max_position_embeddings
    if (config.max_model_len or 0) > limit and _has_dynamic_rope(model):
        raise ValueError(
            f"max_model_len is {config.max_model_len}; rope scaling of the type 'dynamic' is not supported beyond "
            f"max_position_embeddings, {limit}, from where on it changes all positions of a text with its length; set "
            f"max_model_len to at most {limit}"
        )
    if (config.max_model_len or 0) > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {limit} "
            f"(max_position_embeddings in its config.json); set max_model_len to at most {limit}, or, if the model is "
            f"made for more, hf_overrides to {{'max_position_embeddings': {config.max_model_len}}}"
        )
    # a GPU is built for bfloat16; float32 must be set
    own_dtype = "bfloat16" if device == "cuda" and model.dtype == "float32" else model.dtype
    dtype = own_dtype if config.dtype == "auto" else config.dtype
    models = [model] if found is None else [model, found.config]
    layer_chain = NO_LAYER_CHAIN
    quantized = choose_quantization(config.quantization, model.quantization)
    # of GGUF files; elsewhere they are dequantized while they are loaded
    blocks: Literal["read", "matrices", ""] = ""
    if config.world_size == 1 and config.expert_split is None:
        if device == "cpu" and machine.has_native:
            blocks = "read"
        elif device == "cuda" and machine.has_triton and dtype != "float32":
            blocks = "matrices"
    has_biased_experts = any(layer.experts is not None and layer.experts.has_bias for layer in model.layers)
    if quantized.method == "gguf" and has_biased_experts and blocks != "read":
        raise ConfigError(
            f"{model.architecture} from a GGUF file runs on a CPU with the C kernels, in one rank; take its safetensors"
        )
    has_plain_weights = device == "cuda" and not quantized.method
    if has_plain_weights and all(layer.is_fused for layer in plan_fusion(model, decision.runner)):
        layer_chain = plan_whole_layers(
            model,
            dtype=dtype,
            block_size=config.block_size,
            kv_layout=decision.kv_layout,
            has_fp8_kv=config.kv_cache_dtype in KV_DTYPES,
            num_ranks=config.world_size,
            is_hopper=machine.is_hopper,
            num_sms=machine.num_sms,
            has_nvrtc=machine.has_nvrtc,
        )
    return EngineShape(
        config=config,
        model=model,
        dtype=dtype,
        device=device,
        runner=decision.runner,
        kernels=plan_kernels(
            DeviceFacts(
                device,
                machine.has_native,
                machine.has_triton,
                config.compiles_layers,
                frozenset(
                    (mixer.head_dim, mixer.num_heads // mixer.num_kv_heads)
                    for model in models
                    for mixer in model.attentions
                ),
                has_hopper=machine.has_triton and machine.is_hopper and not machine.hopper_problem,
                has_layer_chain=layer_chain.max_rows > 0,
            )
        ),
        layer_chain=layer_chain,
        kv_layout=decision.kv_layout,
        frees_windows=decision.kv_layout == ARENA and all(mixer.is_causal for mixer in model.attentions),
        max_model_len=config.max_model_len or limit,
        drafter=drafter_shape(
            config,
            model,
            found,
            dtype,
            device,
            UNQUANTIZED if found is None else _linear_methods(found.config, blocks=blocks),
        ),
        linear_methods=_linear_methods(replace(model, quantization=quantized), blocks=blocks),
    )


def _expert_placements(config: EngineConfig, model: ModelConfig) -> Mapping[int, tuple[int, ...]]:
    """Where experts are at the start, by layers, if that follows from a load of earlier runs."""
    split, folder = config.expert_split, None if config.eplb_config is None else config.eplb_config.load_initial
    if split is None or folder is None:
        return {}
    sizes = {number: layer.experts.num_experts for number, layer in enumerate(model.layers) if layer.experts}
    slots = {number: [split.slots(rank, size) for rank in range(split.num_ranks)] for number, size in sizes.items()}
    return read_placements(Path(folder).expanduser(), sizes, slots, setting="eplb_config: load_initial")


def _linear_methods(model: ModelConfig, *, blocks: Literal["read", "matrices", ""]) -> LinearMethods:
    return linear_methods(model.quantization, has_tied_head=model.tie_word_embeddings, blocks=blocks)


def _has_dynamic_rope(model: ModelConfig) -> bool:
    ropes = (mixer.rope for mixer in model.attentions)
    return any(rope is not None and rope.rope_type == "dynamic" for rope in ropes)


def _executor(config: EngineConfig, device: str) -> str:
    """Where workers run: see `EnginePlan.executor`."""
    backend = config.distributed_executor_backend
    restarts_gpu = config.on_error == "restart" and device == "cuda"  # an error can leave a process without the GPU
    if restarts_gpu and backend == "uni":
        raise ValueError(
            "on_error is 'restart', but distributed_executor_backend is 'uni': a process cannot use a GPU again after "
            "an error of it; set distributed_executor_backend to 'mp' or 'auto'"
        )
    if backend == "ray":
        return "ray"
    return "mp" if backend == "mp" or config.world_size > 1 or restarts_gpu else "uni"


def _check_gpu(plan: EnginePlan) -> None:
    """Raises ValueError: a setting needs what the GPU or the C library do not have."""
    config, machine = plan.config, plan.machine
    if plan.device != "cuda":
        return
    if not machine.has_e4m3 and plan.kv_dtype == KV_DTYPES["fp8_e4m3"]:
        raise ValueError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, and {machine.gpu_name} has no conversions of e4m3 (compute "
            "capability 8.9); set it to 'fp8_e5m2' or 'auto'"
        )
    if not config.enable_sleep_mode:
        return
    if not machine.has_native:
        raise ValueError(
            f"enable_sleep_mode is True, but the C library, which maps and unmaps GPU memory, cannot be used: "
            f"{machine.native_problem or 'it is not there'}; leave enable_sleep_mode out"
        )
    if plan.connector is not None and names_connector(plan.connector.config, "NixlConnector"):
        raise ValueError(
            "enable_sleep_mode is True, but NixlConnector registers the KV cache, which must stay mapped; "
            "leave one of them out"
        )


_NEEDS = {"embed": "embed", "embedding": "embed", "classify": "classify", "reward": "classify", "score": "score"}
"""Values of ``task`` and ``convert``, and the task that a model must have."""


def _pooling(
    config: EngineConfig, content: Mapping[str, Any], model: ModelConfig, folder: Path, *, config_only: bool
) -> Pooling | None:
    """What the engine pools; None: it generates. ``content``: of ``config.json``, with overrides."""
    base_models = tuple(entry.base_model for entry in ARCHITECTURES.values())
    is_own = is_pooling_model(content, folder, base_models)
    if config.runner == "generate" and config.pooler_config is not None:
        raise ValueError("pooler_config is set, and runner is 'generate'; leave one of them out")
    if config.runner == "generate" and is_bidirectional(content):
        raise ConfigError(
            f"{folder / 'config.json'}: tokens attend to later ones (is_causal, use_bidirectional_attention), so the "
            "model generates no text; leave runner='generate' out"
        )
    if config.runner == "generate" or (config.runner == "auto" and not is_own and config.pooler_config is None):
        return None
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    pooling = resolve_pooling(content, folder, config.pooler_config, **sizes)
    if tokens := classifier_tokens(Fields(content, {}, str(folder / "config.json"))):
        from fleetfoot.tokenizer.tokenizer import Tokenizer  # other plans need none

        name, setting = (config.tokenizer, "tokenizer") if config.tokenizer else (config.model, "model")
        if config_only:  # without weights
            folder = find_model(name, config.revision if setting == "model" else None, setting="tokenizer")
        elif config.tokenizer:
            folder = find_model(name, setting=setting)
        vocabulary = Tokenizer.from_path(folder).get_vocab()
        if missing := [token for token in tokens if token not in vocabulary]:
            raise ConfigError(f"classifier_from_token is {tokens!r}, and the vocabulary does not have {missing[0]!r}")
        pooling = replace(pooling, token_ids=tuple(vocabulary[token] for token in tokens))
    for token in pooling.token_ids:
        if token >= model.vocab_size:
            raise ConfigError(f"a score is the logit of token {token}, and vocab_size is {model.vocab_size}")
    for setting, value in (("task", config.task), ("convert", config.convert)):
        if (task := _NEEDS.get(value, pooling.task)) not in pooling.tasks:
            has = ", ".join(pooling.tasks)
            hint = "; classes need a checkpoint with a head for scores" if task == "classify" else ""
            raise FieldError(setting, f"is {value!r}, and this model has {has}; leave it out{hint}", value)
    return pooling


def _for_pooling(config: EngineConfig, model: ModelConfig, pooling: Pooling) -> tuple[EngineConfig, ModelConfig]:
    """The settings and the model with a head for scores, or with none."""
    for name in ("async_scheduling", "speculative_config", "logits_processors"):
        if value := getattr(config, name):
            raise ValueError(f"{name} is {value!r}, but the engine pools; leave it out")
    if not pooling.is_causal:  # each token attends to all others, so a prompt is one chunk
        config = replace(config, enable_chunked_prefill=False, enable_prefix_caching=False)
    if pooling.max_length is not None and config.max_model_len is None:
        config = replace(config, max_model_len=min(pooling.max_length, model.max_position_embeddings))
    model = replace(model, head=pooling.head, num_labels=pooling.num_labels)
    model = model.with_mixers(is_causal=pooling.is_causal)
    return config, model if pooling.head == "logits" else replace(model, tie_word_embeddings=False)


def find_model(name: str, revision: str | None = None, *, config_only: bool = False, setting: str = "model") -> Path:
    """The folder of a model: the embedded one by its name, a local path, or a hub id."""
    if name == EMBEDDED_MODEL and not Path(name).exists():
        return embedded_model_path()
    return resolve_model(name, revision, config_only=config_only, setting=setting)


def _with_end_token(model: ModelConfig, tokenizer_path: Path | None) -> ModelConfig:
    """The model with its tokenizer's end token beside those of its own files."""
    if tokenizer_path is None:
        return model
    from fleetfoot.tokenizer.files import read_end_token  # token ids need no library of tokenizers

    end = read_end_token(tokenizer_path)
    if end is None or end >= model.vocab_size:
        return model
    return replace(model, eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, end))))


def _tokenizer_path(config: EngineConfig, model_path: Path) -> Path | None:
    if config.skip_tokenizer_init:
        if config.tokenizer is not None:
            raise ValueError(f"tokenizer is {config.tokenizer!r}, but skip_tokenizer_init is set; leave one out")
        return None
    return model_path if config.tokenizer is None else find_model(config.tokenizer, setting="tokenizer")

"""How a checkpoint stores quantized weights: ``quantization_config`` of its ``config.json``, by names of layers.

Read are compressed-tensors, FP8 as of Qwen3-FP8 and DeepSeek, ModelOpt's FP8, AWQ, GPTQ, MXFP4 of GPT-OSS and GGUF's
types. A format or a field that is not supported is refused by its name. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleetfoot.config.json_fields import Fields

BLOCK_TYPE_NAMES = (*("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),)
"""Types of tensors in GGUF files."""

Rules = tuple[tuple[str, "WeightFormat | None"], ...]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a checkpoint stores the weight of a linear layer."""

    values: str
    """``fp8`` (e4m3), ``int8``, ``int4`` or ``mxfp4``; in GGUF files the name of a type, or those of gates, ups and
    downs with a plus sign between them."""
    tensors: str = "plain"
    """Names and layouts of the tensors: ``plain`` (``weight``, ``weight_scale``), ``scale_inv`` (``weight``,
    ``weight_scale_inv``), ``pack-quantized`` and ``mxfp4-pack-quantized`` of compressed-tensors, ``awq``, ``gptq`` or
    ``gptq_v2``; ``mxfp4``: the stacks of GPT-OSS; ``float``: weights are not quantized, and are while loading."""
    block: tuple[int, int] = (1, 0)
    """Outputs and inputs that share a scale; 0: all."""
    activations: str = ""
    """How inputs are quantized: ``token`` (a scale for each row), ``group`` (a scale for each row and ``block[1]``
    inputs), ``static`` (a scale of the checkpoint); empty: they are not."""
    has_zeros: bool = False
    """Whether groups have zero points."""
    is_ordered: bool = False
    """Whether inputs belong to groups in an order of their own (GPTQ's ``desc_act``)."""

    @property
    def has_8_bits(self) -> bool:
        return self.values in ("fp8", "int8")

    def __str__(self) -> str:
        """``fp8 in blocks of 128 x 128, inputs quantized by group``."""
        if self.tensors == "gguf":
            return self.values
        outputs, inputs = self.block
        sizes = {(0, 0): "by tensor", (1, 0): "by output"}
        scales = sizes.get(self.block) or (
            f"in groups of {inputs}" if outputs == 1 else f"in blocks of {outputs} x {inputs}"
        )
        zeros = ", with zero points" if self.has_zeros and not self.has_8_bits else ""
        return f"{self.values} {scales}{zeros}" + (f", inputs quantized by {self.activations}" * bool(self.activations))


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The quantized layers of a checkpoint."""

    method: str
    """``quant_method``; empty: nothing is quantized."""
    rules: Rules = ()
    """Patterns of names, as of `LinearMethods`, each with the format of layers that fit; None: not quantized. The first
    one that fits counts; other layers are not quantized."""
    has_kv_scales: bool = False
    """Whether the checkpoint has scales for a KV cache in FP8."""
    has_scales_of_heads: bool = False
    """Whether these are one for each KV head."""

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Those that occur, each once."""
        return tuple(dict.fromkeys(form for _, form in self.rules if form is not None))


NOT_QUANTIZED = QuantizedWeights("")


def read_quantization(content: Mapping[str, Any], source: str) -> QuantizedWeights:
    """``content``: of ``config.json``; ``source``: its path, for messages. Raises ConfigError: a format or a field is
    not supported, or a value is invalid."""
    names = [name for name in ("quantization_config", "compression_config") if content.get(name) not in (None, {})]
    if not names:
        return NOT_QUANTIZED
    outer = Fields(content, {}, source)
    fields = Fields(outer.mapping(names[0]), {}, source, f"{names[0]}.")
    if len(names) > 1 and content[names[1]] != content[names[0]]:
        raise outer.error(names[1], f"there is {names[0]} too; leave one of them out")
    method = fields.raw("quant_method")
    if method is None:  # as GPTQModel calls it
        method = fields.raw("method")
    if method is None and "quantization" in fields.content:  # as in hf_quant_config.json
        method = "modelopt"
    if not isinstance(method, str) or method not in _READERS:
        raise fields.error("quant_method", f"supported: {', '.join(_READERS)}, and weights that are not quantized")
    found = _READERS[method](fields)
    _refuse_unread(fields)
    return found


def _refuse_unread(fields: Fields, neutral: Iterable[str] = ()) -> None:
    """Raise for a field that was not read and is set."""
    for name, value in fields.content.items():
        if name not in fields.read and name not in neutral and value not in (None, False, [], {}, ""):
            raise fields.error(name, "the field is unknown here; if it has no effect, leave it out")


def _choice(fields: Fields, name: str, *choices: Any) -> Any:
    value = fields.raw(name)
    if value not in choices:
        raise fields.error(name, f"supported: {', '.join(map(str, choices))}")
    return value


def _names(fields: Fields, name: str) -> list[str]:
    """A list of names of layers, or of regular expressions after ``re:``."""
    names = fields.raw(name) or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise fields.error(name, "expected a list of names")
    for each in names:
        if each.startswith("re:"):
            _check_expression(fields, name, each[3:])
    return names


def _check_expression(fields: Fields, name: str, expression: str) -> None:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.error(name, f"{expression!r} is no regular expression: {error}") from error


def _within(names: Iterable[str]) -> Rules:
    """Rules for layers that are not quantized: a name is one of a layer, of a module around it, or the end of one."""
    return tuple((rf"re:(.*\.)?{re.escape(each.strip('.'))}(\..*)?$", None) for each in names)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    sizes = fields.raw(name)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(each) is int and each > 0 for each in sizes):
        raise fields.error(name, "expected a list of two integers of at least 1")
    _check_group(fields, name, sizes[1])
    return sizes[0], sizes[1]


# --- FP8 as of Qwen3-FP8 and DeepSeek ---------------------------------------------------------------------------------


def _read_fp8(fields: Fields) -> QuantizedWeights:
    _choice(fields, "fmt", None, "e4m3")
    _choice(fields, "scale_fmt", None, "float")
    dynamic = _choice(fields, "activation_scheme", None, "dynamic", "static") != "static"
    block = fields.raw("weight_block_size")
    if block is None:
        form = WeightFormat("fp8", "plain", (0, 0), "token" if dynamic else "static")
    else:
        if not dynamic:
            raise fields.error("activation_scheme", "blocks have dynamic activations")
        form = WeightFormat("fp8", "scale_inv", _block(fields, "weight_block_size"), "group")
    skipped = _names(fields, "modules_to_not_convert") + _names(fields, "ignored_layers")
    rules = *_within(skipped), ("lm_head", None), ("*", form)
    fields.read.update(("dequantize", "is_checkpoint_fp8_serialized", "kv_cache_scheme"))
    return QuantizedWeights("fp8", rules, bool(fields.raw("kv_cache_scheme")))


def _check_group(fields: Fields, name: str, size: int) -> None:
    """A group has whole words of packed values and whole tiles of a kernel."""
    if size < 16 or size % 16:
        raise fields.error(name, "expected groups of a multiple of 16 inputs")


# --- ModelOpt ---------------------------------------------------------------------------------------------------------

_MODELOPT = {
    "FP8": WeightFormat("fp8", "plain", (0, 0), "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("fp8", "plain", (1, 0), "token"),
}


def _read_modelopt(fields: Fields) -> QuantizedWeights:
    whole = fields
    if "quantization" in fields.content:
        fields = Fields(whole.mapping("quantization"), {}, whole.source, f"{whole.prefix}quantization.")
    form = _MODELOPT[_choice(fields, "quant_algo", *_MODELOPT)]
    if fields.raw("config_groups"):  # the same once more, in the words of compressed-tensors
        fields.read.add("config_groups")
    kv = fields.raw("kv_cache_quant_algo") or fields.raw("kv_cache_scheme")
    excluded = _names(fields, "exclude_modules") + _names(fields, "ignore")
    exact = [name for name in excluded if "*" not in name]
    rules = (*((name, None) for name in excluded if "*" in name), *_within(exact))
    neutral = ("producer", "quant_method")
    _refuse_unread(fields, neutral)
    whole.read.update((*neutral, "quantization", *fields.read))
    return QuantizedWeights("modelopt", (*rules, ("lm_head", None), ("*", form)), bool(kv))


# --- AWQ and GPTQ -----------------------------------------------------------------------------------------------------


def _read_awq(fields: Fields) -> QuantizedWeights:
    _choice(fields, "bits" if fields.raw("w_bit") is None else "w_bit", 4)
    name = "group_size" if fields.raw("q_group_size") is None else "q_group_size"
    group = _group_size(fields, name)
    _choice(fields, "method", None, "awq")
    for version in ("version", *_LAYOUT_NAMES):
        if str(fields.raw(version) or "gemm").lower() != "gemm":
            raise fields.error(version, "supported: gemm")
    _choice(fields, "pack_dtype", *_PACKED)
    form = WeightFormat("int4", "awq", (1, group), has_zeros=True)
    rules = *_within(_names(fields, "modules_to_not_convert")), *_dynamic_rules(fields, lambda own: form)
    # files have zero points also where zero_point is false or sym is true: 8
    neutral = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend", "bits", "group_size")
    fields.read.update((*neutral, *_TUNING, "zero_point", "sym", "desc_act", "meta"))
    return QuantizedWeights("awq", (*rules, *_plain_rules(fields), ("*", form)))


_LAYOUT_NAMES, _PACKED = ("checkpoint_format", "format"), (None, "int32", "torch.int32")


def _plain_rules(fields: Fields) -> Rules:
    """Routers are never quantized, and no field says so; the head may be."""
    routers = (r"re:.*\.(gate|router|router\.layer|shared_expert_gate)$", None)
    return (routers,) if fields.raw("lm_head") is True else (routers, ("lm_head", None))


def _dynamic_rules(fields: Fields, read: Callable[[Fields], WeightFormat]) -> Iterator[tuple[str, WeightFormat | None]]:
    """Regular expressions of names, which GPTQModel matches from their beginning, each with fields that differ."""
    dynamic = Fields(fields.mapping("dynamic"), {}, fields.source, f"{fields.prefix}dynamic.")
    for pattern in dynamic.content:
        expression = pattern.removeprefix("-:").removeprefix("+:")
        _check_expression(dynamic, pattern, expression)
        content = {**fields.content, **dynamic.mapping(pattern)}
        own = Fields(content, {}, fields.source, f"{dynamic.prefix}{pattern}.")
        yield f"re:{expression}", None if pattern.startswith("-:") else read(own)


def _group_size(fields: Fields, name: str = "group_size") -> int:
    """0: one group with all inputs, which files have as -1."""
    if fields.raw(name) == -1:
        return 0
    size = fields.integer(name)
    _check_group(fields, name, size)
    return size


_TUNING = (
    *("autoround_version", "provider", "enable_quanted_input", "to_quant_block_names", "low_gpu_mem_usage", "iters"),
    *(
        "lr",
        "minmax_lr",
        "nsamples",
        "seqlen",
        "batch_size",
        "train_bs",
        "gradient_accumulate_steps",
        "amp",
        "data_type",
    ),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "scale_dtype"),
)
"""How AutoRound found the weights."""
_GPTQ_NEUTRAL = (
    *("static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "model_name_or_path", "tokenizer"),
    *("model_file_base_name", "meta", "dataset", "batch_size", "block_name_to_quantize", "pad_token_id", "use_exllama"),
    *("module_name_preceding_first_block", "use_cuda_fp16", "model_seqlen", "max_input_length", "exllama_config"),
    *("cache_block_outputs", "disable_exllama", "backend", "quant_method", "is_marlin_format", "hyb_act", "mse"),
)
"""Fields that say how the weights were made, or how other engines run them."""


def _read_gptq(fields: Fields) -> QuantizedWeights:
    _choice(fields, "method", None, "gptq")
    layouts = [_choice(fields, name, None, "", "gptq", "gptq_v2") or "" for name in _LAYOUT_NAMES]
    if all(layouts) and layouts[0] != layouts[1]:
        raise fields.error("format", f"checkpoint_format is {layouts[0]!r}; leave one of them out")
    layout = layouts[0] or layouts[1] or "gptq"
    _choice(fields, "pack_dtype", *_PACKED)
    fields.refuse("modules_in_block_to_quantize", because="all linear layers must be quantized, or named in dynamic")
    form = _gptq_format(fields, layout)
    rules = *_dynamic_rules(fields, lambda own: _gptq_format(own, layout)), *_plain_rules(fields)
    fields.read.update((*_GPTQ_NEUTRAL, *_TUNING))
    return QuantizedWeights("gptq", (*rules, ("*", form)))


def _gptq_format(fields: Fields, layout: str) -> WeightFormat:
    bits = _choice(fields, "bits", 4, 8)
    group, is_ordered = _group_size(fields), bool(fields.raw("desc_act"))
    is_symmetric = fields.raw("sym") is not False  # files have zero points in any case
    if bits == 8 and not is_symmetric:
        raise fields.error("sym", "8 bits are supported symmetric")
    if bits == 8 and is_ordered and group:
        raise fields.error("desc_act", "8 bits are supported with groups in order")
    values = {4: "int4", 8: "int8"}[bits]
    return WeightFormat(values, layout, (1, group), has_zeros=True, is_ordered=is_ordered and group > 0)


# --- compressed-tensors -----------------------------------------------------------------------------------------------

_CT_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized")
_OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields that say how scales were found, and in which dtype they are."""


def _read_compressed_tensors(fields: Fields) -> QuantizedWeights:
    for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        part = fields.mapping(name)
        if part and part.get("format") != "dense":
            raise fields.error(name, "only dense weights without transforms are supported")
    by_target: dict[str, WeightFormat | None] = {}
    groups = Fields(fields.mapping("config_groups"), {}, fields.source, f"{fields.prefix}config_groups.")
    for name in groups.content:
        group = Fields(groups.mapping(name), {}, fields.source, f"{groups.prefix}{name}.")
        named = group if group.raw("format") else fields
        if (layout := named.raw("format")) not in _CT_FORMATS:
            raise named.error("format", f"supported, for the file or a group: {', '.join(_CT_FORMATS)}")
        form = _ct_format(group, layout)
        for target in _names(group, "targets"):
            if target != "Linear" and not target.startswith("re:") and "." not in target and target != "lm_head":
                raise group.error("targets", "supported: Linear, names of layers, and regular expressions after re:")
            by_target.setdefault(target, form)
        _refuse_unread(group)
    if not by_target:
        raise fields.error("config_groups", "expected an object with a group for each format")
    kinds = sorted(by_target, key=lambda target: (target == "Linear", target.startswith("re:")))  # names come first
    rules = tuple(("*" if target == "Linear" else target, by_target[target]) for target in kinds)
    fields.read.update(("quantization_status", "global_compression_ratio", "version", "format", "ignore"))
    skipped = tuple((name, None) for name in _names(fields, "ignore"))
    kv = Fields(fields.mapping("kv_cache_scheme"), {}, fields.source, f"{fields.prefix}kv_cache_scheme.")
    if not kv.content:
        return QuantizedWeights("compressed-tensors", (*skipped, *rules))
    for name, value in (("num_bits", 8), ("type", "float"), ("dynamic", False), ("symmetric", True)):
        _choice(kv, name, value, None)
    of_heads = _choice(kv, "strategy", None, "tensor", "attn_head") == "attn_head"
    kv.read.update((*_OBSERVED, "actorder", "block_structure", "group_size"))
    _refuse_unread(kv)
    return QuantizedWeights("compressed-tensors", (*skipped, *rules), True, of_heads)


def _ct_format(group: Fields, layout: Any) -> WeightFormat:
    group.refuse("output_activations", because="outputs of layers are not quantized")
    weights = Fields(group.mapping("weights"), {}, group.source, f"{group.prefix}weights.")
    bits, kind = _choice(weights, "num_bits", 4, 8), _choice(weights, "type", "int", "float")
    strategy = _choice(weights, "strategy", "tensor", "channel", "group", "block")
    is_symmetric = weights.raw("symmetric") is not False
    _choice(weights, "dynamic", False, None)
    _choice(weights, "actorder", None, False, "weight", "static")  # they change no tensor's layout
    group_size = weights.raw("group_size")
    if strategy == "block":
        block = _block(weights, "block_structure")
    else:
        block = {"tensor": (0, 0), "channel": (1, 0), "group": (1, group_size)}[strategy]
        if strategy == "group":
            _check_group(weights, "group_size", weights.integer("group_size"))
    weights.read.update((*_OBSERVED, "block_structure", "group_size"))
    _refuse_unread(weights)
    values = {(4, "int"): "int4", (8, "int"): "int8", (8, "float"): "fp8", (4, "float"): "mxfp4"}[bits, kind]
    form = WeightFormat(values, "plain", block, _ct_activations(group, bits, kind), not is_symmetric)
    if values == "int8" and layout == "pack-quantized" and is_symmetric and strategy in ("group", "channel"):
        if form.activations:
            raise group.error("input_activations", "packed weights are supported with inputs that are not quantized")
        return replace(form, tensors=layout)
    if values in ("fp8", "int8"):
        if not is_symmetric or strategy == "group" or layout not in _CT_FORMATS[:3]:
            raise weights.error("num_bits", "8 bits are supported symmetric, not packed, by tensor, channel or block")
        return form
    expected = "pack-quantized" if values == "int4" else "mxfp4-pack-quantized"
    if layout != expected or strategy not in ("group", "channel") or form.activations:
        raise weights.error("num_bits", f"4 bits are supported as {expected}, by group or channel, without activations")
    if values == "mxfp4" and (block != (1, 32) or not is_symmetric):
        raise weights.error("group_size", "MXFP4 has symmetric groups of 32")
    return replace(form, tensors=expected)


def _ct_activations(group: Fields, bits: int, kind: str) -> str:
    if group.raw("input_activations") is None:
        return ""
    if bits == 4:
        raise group.error("input_activations", "weights of 4 bits are supported with inputs that are not quantized")
    fields = Fields(group.mapping("input_activations"), {}, group.source, f"{group.prefix}input_activations.")
    _choice(fields, "num_bits", bits)
    _choice(fields, "type", kind)
    if fields.raw("symmetric") is False:
        raise fields.error("symmetric", "supported: symmetric activations")
    dynamic = _choice(fields, "dynamic", True, False)
    strategy = (
        _choice(fields, "strategy", "token", "tensor", "group") if dynamic else _choice(fields, "strategy", "tensor")
    )
    if strategy == "group":
        fields.integer("group_size")
    fields.read.update((*_OBSERVED, "actorder", "block_structure", "group_size"))
    _refuse_unread(fields)
    # a scale for each row is finer than one for the batch, and a row does not depend on others
    return "static" if not dynamic else "group" if strategy == "group" else "token"


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _read_gguf(fields: Fields) -> QuantizedWeights:
    """The types of modules, as `fleetfoot.weights.gguf_config` lists them; those of experts are ``gate+up+down``."""
    tensors = Fields(fields.mapping("tensors"), {}, fields.source, f"{fields.prefix}tensors.")
    modules: dict[str, list[str]] = {}  # type -> names
    for name in tensors.content:
        values = _choice(tensors, name, *BLOCK_TYPE_NAMES) if "+" not in str(tensors.raw(name)) else tensors.raw(name)
        if any(each not in BLOCK_TYPE_NAMES for each in values.split("+")):
            raise tensors.error(name, f"supported: {', '.join(BLOCK_TYPE_NAMES)}")
        modules.setdefault(values, []).append(name)
        if name == "model.embed_tokens" and "lm_head" not in tensors.content:  # a tied head
            modules[values].append("lm_head")
    rules = tuple(
        (f"re:(?:{'|'.join(map(re.escape, names))})$", WeightFormat(values, "gguf"))
        for values, names in modules.items()
    )
    return QuantizedWeights("gguf", rules)


# --- MXFP4 of GPT-OSS -------------------------------------------------------------------------------------------------


def _read_mxfp4(fields: Fields) -> QuantizedWeights:
    """Experts alone are quantized."""
    skipped = tuple((f"{name}*", None) for name in _names(fields, "modules_to_not_convert"))
    fields.read.add("dequantize")
    return QuantizedWeights("mxfp4", (*skipped, ("*.mlp.experts*", WeightFormat("mxfp4", "mxfp4", (1, 32)))))


_READERS: Mapping[str, Callable[[Fields], QuantizedWeights]] = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gguf": _read_gguf,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
QUANTIZED_WHILE_LOADING: Mapping[str, WeightFormat] = {
    "fp8": WeightFormat("fp8", "float", (1, 0), "token"),
    "int4": WeightFormat("int4", "float", (1, 128), has_zeros=False),
    "int8": WeightFormat("int8", "float", (1, 0), "token"),
}
"""Values of the setting ``quantization`` for checkpoints that are not quantized."""


def choose_quantization(setting: str | None, stored: QuantizedWeights) -> QuantizedWeights:
    """Formats of the layers. ``setting``: ``quantization``; ``stored``: the checkpoint's. Raises ValueError: they do
    not go together, or there is no such setting."""
    if setting is None or setting == stored.method:
        return stored
    if stored.method:
        raise ValueError(
            f"quantization is {setting!r}, and the checkpoint's weights are quantized, {stored.method}; leave it out"
        )
    if setting not in QUANTIZED_WHILE_LOADING:
        names = ", ".join(QUANTIZED_WHILE_LOADING)
        raise ValueError(
            f"quantization is {setting!r}; weights that are not quantized can be quantized while they are loaded, by "
            f"{names}"
        )
    return QuantizedWeights(setting, (("lm_head", None), ("*", QUANTIZED_WHILE_LOADING[setting])))

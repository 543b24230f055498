"""GPT-OSS (OpenAI 2025): attention with sinks and alternating windows, and experts with a limited SwiGLU."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.experts import SparseMLP
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.quantization.base import ExpertNames


class GptOssSparseMLP(SparseMLP):
    """Experts in stacks of transposed matrices, with biases."""

    names: ClassVar[ExpertNames] = ExpertNames(are_stacked=True, are_transposed=True)
    router_name: ClassVar[str] = "router"


class GptOssDecoderLayer(DecoderLayer):
    """Attention and experts."""

    experts_class: ClassVar[type[nn.Module]] = GptOssSparseMLP


class GptOssForCausalLM(LlamaForCausalLM):
    """The model of checkpoints in MXFP4 and bfloat16. Sinks, biases, windows and limits follow the config."""

    layer_class: ClassVar[type[DecoderLayer]] = GptOssDecoderLayer

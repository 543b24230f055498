"""The address at which vLLM's scripts look for sampling parameters."""

from fleetfoot.records.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.utils.vllm_paths import provide_names

GuidedDecodingParams = StructuredOutputsParams
"""The earlier name."""

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

provide_names(__name__)

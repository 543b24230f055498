"""The address at which vLLM's scripts look for sampling parameters."""

from fleetfoot.compat.paths import provide_names
from fleetfoot.records.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from fleetfoot.records.structured_outputs import StructuredOutputsParams

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

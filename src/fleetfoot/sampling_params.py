"""The address at which vLLM's scripts look for sampling parameters."""

from fleetfoot.records.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from fleetfoot.utils.vllm_paths import provide_names

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams"]

provide_names(__name__)

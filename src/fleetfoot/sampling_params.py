"""The address at which vLLM's scripts look for sampling parameters."""

from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.vllm_paths import provide_names

__all__ = ["RequestOutputKind", "SamplingParams"]

provide_names(__name__)

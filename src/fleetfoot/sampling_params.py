"""The address at which vLLM's scripts look for sampling parameters."""

from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["RequestOutputKind", "SamplingParams"]

"""The settings of the balancing of experts, ``eplb_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleetfoot.config.json_fields import Bounds, JSONSettings

_POSITIVE = {"bounds": Bounds("be at least 1", 1)}


@dataclass(frozen=True, slots=True)
class EPLBConfig(JSONSettings):
    """``--eplb-config``; names as in vLLM, and two for files."""

    setting: ClassVar[str] = "eplb_config"
    neutral: ClassVar[Mapping[str, Any]] = {"use_async": True, "policy": "default", "communicator": None}
    advice: ClassVar[Mapping[str, str]] = {
        "use_async": "leave it out: experts move beside the steps",
        "policy": "leave it out: there is one",
        "communicator": "leave it out: it follows from the devices",
    }

    window_size: int = field(default=1000, metadata=_POSITIVE)
    """Steps before a rebalancing of which the load counts."""
    step_interval: int = field(default=3000, metadata=_POSITIVE)
    """Steps from one rebalancing to the next. The first comes after a quarter of them."""
    num_redundant_experts: int = field(default=0, metadata={"bounds": Bounds("be at least 0", 0)})
    """Slots of a layer beyond one for each expert, on all ranks together."""
    log_balancedness: bool = False
    """Log at each rebalancing how even the ranks' loads are."""
    log_balancedness_interval: int = field(default=1, metadata=_POSITIVE)
    """Rebalancings from one such line to the next."""
    load_initial: str | None = None
    """A folder that ``save`` has written: experts are placed for that load from the start."""
    save: str | None = None
    """A folder for the load and the placement of each rebalancing."""

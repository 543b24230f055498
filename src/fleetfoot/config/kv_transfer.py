"""``kv_transfer_config``: which connector moves KV in or out of the engine, and in which role."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.config.json_record import checked_object, string_field

KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
KV_LOAD_FAILURE_POLICIES = ("recompute", "fail")
DEFAULT_KV_TRANSFER_TIMEOUT = 60.0
"""Seconds."""
_STRINGS = ("kv_connector", "kv_role", "kv_connector_module_path", "engine_id", "kv_buffer_device", "kv_ip")


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """What ``--kv-transfer-config`` says; names as in vLLM. It is active once it names a connector and a role."""

    kv_connector: str | None = None
    """Name of the connector's class."""
    kv_role: str | None = None
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    kv_connector_module_path: str | None = None
    """The module that the class is imported from, for connectors that are not Fleetfoot's own."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The connector's own settings, handed to it as they are."""
    engine_id: str | None = None
    """The name that other engines know this one by."""
    kv_rank: int | None = None
    """Place of this engine among those of a transfer group; for the connector."""
    kv_parallel_size: int | None = None
    """Engines in the transfer group; for the connector."""
    kv_ip: str | None = None
    """Address at which the group meets; for the connector."""
    kv_port: int | None = None
    """Port at which the group meets; for the connector."""
    kv_buffer_device: str | None = None
    """Where KV waits on its way, ``cpu`` or ``cuda``; for the connector."""
    kv_buffer_size: int | None = None
    """Bytes in which KV waits on its way; for the connector."""
    kv_load_failure_policy: str = "recompute"
    """What becomes of a request whose KV cannot be loaded: ``recompute`` computes its tokens here, ``fail`` ends it
    with the reason."""
    kv_transfer_timeout: float = DEFAULT_KV_TRANSFER_TIMEOUT
    """Seconds after which a transfer that has not ended counts as failed."""

    def __post_init__(self) -> None:
        for name in _STRINGS:
            string_field("kv_transfer_config", name, getattr(self, name))
        module = self.kv_connector_module_path
        if module is not None and (module.startswith(".") or module.endswith(".py") or "/" in module):
            raise ValueError(
                f"kv_transfer_config: kv_connector_module_path is {module!r}; it must be the whole name of a module "
                "that Python finds, such as 'my_package.connector'"
            )
        if self.kv_role is not None and self.kv_role not in KV_ROLES:
            raise ValueError(f"kv_transfer_config: kv_role is {self.kv_role!r}; it can be {', '.join(KV_ROLES)}")
        if self.kv_load_failure_policy not in KV_LOAD_FAILURE_POLICIES:
            raise ValueError(
                f"kv_transfer_config: kv_load_failure_policy is {self.kv_load_failure_policy!r}; it can be "
                f"{', '.join(KV_LOAD_FAILURE_POLICIES)}"
            )
        timeout = self.kv_transfer_timeout
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout < math.inf:
            raise ValueError(
                f"kv_transfer_config: kv_transfer_timeout is {timeout!r}; it must be a number of seconds above 0"
            )
        for name in ("kv_rank", "kv_parallel_size", "kv_port", "kv_buffer_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"kv_transfer_config: {name} is {value!r}; it must be an integer of at least 0")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise TypeError(
                f"kv_transfer_config: kv_connector_extra_config is {self.kv_connector_extra_config!r}; it must be an "
                "object"
            )

    @classmethod
    def parse(cls, value: Any) -> KVTransferConfig:
        """From a dictionary or JSON text.

        Raises:
            TypeError, ValueError: it is neither, or has a key or value that means nothing; says which.
        """
        return value if isinstance(value, cls) else cls(**checked_object("kv_transfer_config", value, cls))

    @property
    def is_active(self) -> bool:
        """Whether KV is really to be moved: an empty config is not active, nor one without a role."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def can_load(self) -> bool:
        """Whether the role lets the engine take KV in."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def can_save(self) -> bool:
        """Whether the role lets the engine give KV out."""
        return self.kv_role in ("kv_producer", "kv_both")

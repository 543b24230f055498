"""``kv_transfer_config``: the connector that moves KV in or out of the engine, and its role."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleetfoot.config.json_fields import JSONSettings, string_field

KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
KV_LOAD_FAILURE_POLICIES = ("recompute", "fail")
DEFAULT_KV_TRANSFER_TIMEOUT = 60.0
"""Seconds."""
_STRINGS = ("kv_connector", "kv_role", "kv_connector_module_path", "engine_id", "kv_buffer_device", "kv_ip")


@dataclass(frozen=True, slots=True)
class KVTransferConfig(JSONSettings):
    """``--kv-transfer-config``; names as in vLLM. It is active if it names a connector and a role."""

    setting: ClassVar[str] = "kv_transfer_config"

    kv_connector: str | None = None
    """Name of the connector's class."""
    kv_role: str | None = None
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    kv_connector_module_path: str | None = None
    """The module of the class, for connectors outside Fleetfoot."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the connector, passed to it unchecked."""
    engine_id: str | None = None
    """Name of this engine for other engines."""
    kv_rank: int | None = None
    """Index of this engine in its transfer group; for the connector."""
    kv_parallel_size: int | None = None
    """Engines in the transfer group; for the connector."""
    kv_ip: str | None = None
    """Rendezvous address of the group; for the connector."""
    kv_port: int | None = None
    """Rendezvous port of the group; for the connector."""
    kv_buffer_device: str | None = None
    """Device of the transfer buffer, ``cpu`` or ``cuda``; for the connector."""
    kv_buffer_size: int | None = None
    """Bytes of the transfer buffer; for the connector."""
    kv_load_failure_policy: str = "recompute"
    """What happens to a request whose KV cannot be loaded: ``recompute`` computes its tokens, ``fail`` ends it with an
    error."""
    kv_transfer_timeout: float = DEFAULT_KV_TRANSFER_TIMEOUT
    """Seconds after which an unfinished transfer fails."""

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

    @property
    def is_active(self) -> bool:
        """Whether KV is transferred: the config names a connector and a role."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def can_load(self) -> bool:
        """Whether the role includes loading KV."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def can_save(self) -> bool:
        """Whether the role includes saving KV."""
        return self.kv_role in ("kv_producer", "kv_both")

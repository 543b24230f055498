"""``kv_transfer_config``: the connector that moves KV in or out of the engine, and its role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleetfoot.config.json_fields import ABOVE_ZERO, Bounds, JSONSettings

KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
KV_LOAD_FAILURE_POLICIES = ("recompute", "fail")
DEFAULT_KV_TRANSFER_TIMEOUT = 60.0
"""Seconds."""
_COUNT: dict[str, Any] = {"bounds": Bounds("be an integer of at least 0", 0)}
_SECONDS: dict[str, Any] = {"bounds": Bounds("be a number of seconds above 0", ABOVE_ZERO)}


@dataclass(frozen=True, slots=True)
class KVTransferConfig(JSONSettings):
    """``--kv-transfer-config``; names as in vLLM. It is active if it names a connector and a role."""

    setting: ClassVar[str] = "kv_transfer_config"

    kv_connector: str | None = None
    """Name of the connector's class."""
    kv_role: str | None = field(default=None, metadata={"choices": KV_ROLES})
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    kv_connector_module_path: str | None = None
    """The module of the class, for connectors outside Fleetfoot."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the connector, passed to it unchecked."""
    engine_id: str | None = None
    """Name of this engine for other engines."""
    kv_rank: int | None = field(default=None, metadata=_COUNT)
    """Index of this engine in its transfer group; for the connector."""
    kv_parallel_size: int | None = field(default=None, metadata=_COUNT)
    """Engines in the transfer group; for the connector."""
    kv_ip: str | None = None
    """Rendezvous address of the group; for the connector."""
    kv_port: int | None = field(default=None, metadata=_COUNT)
    """Rendezvous port of the group; for the connector."""
    kv_buffer_device: str | None = None
    """Device of the transfer buffer, ``cpu`` or ``cuda``; for the connector."""
    kv_buffer_size: int | None = field(default=None, metadata=_COUNT)
    """Bytes of the transfer buffer; for the connector."""
    kv_load_failure_policy: str = field(default="recompute", metadata={"choices": KV_LOAD_FAILURE_POLICIES})
    """What happens to a request if its KV cannot be loaded: ``recompute`` computes its tokens, ``fail`` ends it with an
    error."""
    kv_transfer_timeout: float = field(default=DEFAULT_KV_TRANSFER_TIMEOUT, metadata=_SECONDS)
    """Seconds after which an unfinished transfer fails."""

    def __post_init__(self) -> None:
        JSONSettings.__post_init__(self)
        module = self.kv_connector_module_path
        if module is not None and (module.startswith(".") or module.endswith(".py") or "/" in module):
            raise ValueError(
                f"kv_transfer_config: kv_connector_module_path is {module!r}; it must be the whole name of a module "
                "that Python finds, such as 'my_package.connector'"
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

    # --- vLLM's names -----------------------------------------------------------------------------------------------

    is_kv_transfer_instance, is_kv_consumer, is_kv_producer = is_active, can_load, can_save

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """A setting of ``kv_connector_extra_config``, or ``default``."""
        return self.kv_connector_extra_config.get(key, default)

"""Which KV connector an engine has, decided once. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base import registry
from fleetfoot.kv_transfer.base.connector import KVConnector
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.runner.capabilities import KV_LAYOUTS

_GIB, _OFFLOADING = 1 << 30, registry.OFFLOADING_CONNECTOR


@dataclass(frozen=True, slots=True)
class ConnectorPlan:
    """The active KV connector of an engine."""

    config: KVTransferConfig
    """Its settings: ``kv_transfer_config``, what ``kv_offloading_size`` implies, or both side by side."""
    layouts: registry.ConnectorLayouts
    """The KV layouts that it accepts."""
    requested_by: str
    """The setting that requires it."""
    class_name: str = ""
    """The name of the class, with its module; set once an engine is planned, and empty if there is no such class."""

    def layout(self, runner: str) -> str | None:
        """The layout in which ``runner`` (``v1`` or ``v2``) keeps the KV cache; None: none is accepted."""
        return next((name for name in KV_LAYOUTS[runner] if name in self.layouts.accepted), None)

    @property
    def accepts(self) -> str:
        """A clause: the layouts that the connector accepts, or why there are none."""
        accepted = f"accepts {', '.join(sorted(self.layouts.accepted)) or 'no layout'} alone"
        return f"the KV connector {self.layouts.name} {self.layouts.remark or accepted}"

    @property
    def connector_class(self) -> type[KVConnector]:
        """The class that makes both sides. Raises ValueError: there is none, or it is not a `KVConnector`."""
        return find_connector(self.config)


def qualified_name(kind: type) -> str:
    """``module.Class``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def locate_connector(connector: ConnectorPlan | None) -> ConnectorPlan | None:
    """Import the connector's class and note its name. Raises ValueError: the class is not a connector."""
    if connector is None or not connector.layouts.exists:
        return connector
    return replace(connector, class_name=qualified_name(connector.connector_class))


def resolve_connector(config: EngineConfig) -> ConnectorPlan | None:
    """The connector that moves KV; None: no connector is active.

    Raises:
        ValueError: the size of the host's memory is given twice.
        ValueError, TypeError: the settings of several connectors are not as they must be.
    """
    transfer, size = config.kv_transfer_config, config.kv_offloading_size
    if transfer is not None and not transfer.is_active:
        transfer = None
    requested_by = f"kv_offloading_size is {size}"
    if transfer is not None:
        requested_by = f"kv_transfer_config has {transfer.kv_connector} as {transfer.kv_role}"
    if size is not None:
        transfer = _with_offloading(transfer, size)
    if transfer is None:
        return None
    transfer = registry.with_modules(transfer)
    return ConnectorPlan(transfer, registry.connector_layouts(transfer, config), requested_by)


def _with_offloading(transfer: KVTransferConfig | None, size: float) -> KVTransferConfig:
    extra = {registry.CPU_BYTES: round(size * _GIB)}
    offloading = KVTransferConfig(kv_connector=_OFFLOADING, kv_role="kv_both", kv_connector_extra_config=extra)
    if transfer is None:
        return offloading
    if transfer.kv_connector == _OFFLOADING:
        if transfer.kv_connector_extra_config:
            raise ValueError(
                f"kv_offloading_size is {size:g}, and kv_transfer_config has settings for {_OFFLOADING} too "
                f"({', '.join(transfer.kv_connector_extra_config)}); give one of them"
            )
        return replace(transfer, kv_connector_extra_config=extra)
    if registry.names_connector(transfer, _OFFLOADING):
        raise ValueError(
            f"kv_offloading_size is {size:g}, and kv_transfer_config has {_OFFLOADING} among its connectors: "
            "that would be host memory twice; leave kv_offloading_size out, or that connector"
        )
    return registry.joined(offloading, transfer)

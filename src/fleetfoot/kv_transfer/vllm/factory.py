"""vLLM's registry of connectors, over `fleetfoot.kv_transfer.base.registry`."""

from __future__ import annotations

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base import registry


class KVConnectorFactory:
    """Names for connectors that are not Fleetfoot's own."""

    @staticmethod
    def register_connector(name: str, module_path: str, class_name: str) -> None:
        """Let ``kv_connector`` name a class. Raises ValueError: the name is in use."""
        registry.register_connector(name, module_path, class_name)

    @staticmethod
    def get_connector_class(kv_transfer_config: KVTransferConfig) -> type:
        """The class that a config names. Raises ValueError: there is none."""
        return registry.lookup_connector(registry.with_modules(kv_transfer_config))

    @classmethod
    def get_connector_class_by_name(cls, connector_name: str) -> type:
        """The class of a name. Raises ValueError: there is none."""
        return cls.get_connector_class(KVTransferConfig(kv_connector=connector_name, kv_role="kv_both"))

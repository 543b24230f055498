"""What a connector reads from its ``kv_connector_extra_config``, checked, so that no setting is ignored. No torch."""

from __future__ import annotations

import logging
from typing import Any

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.utils.suggest import unknown_keyword

logger = logging.getLogger(__name__)

_FOR_OTHERS = ("kv_rank", "kv_parallel_size", "kv_ip", "kv_port", "kv_buffer_device", "kv_buffer_size")


class ConnectorSettings:
    """Typed reads from the settings of one connector.

    Args:
        config: the connector's.
    """

    def __init__(self, config: KVTransferConfig) -> None:
        self._name = config.kv_connector
        self._config = config
        self._content = dict(config.kv_connector_extra_config)
        self._known: list[str] = []

    def text(self, name: str) -> str | None:
        """Raises ValueError unless it is a string that is not empty, or left out."""
        value = self._read(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(name, value, "a string that is not empty")
        return value

    def integer(self, name: str, default: int | None, *, minimum: int = 1) -> int | None:
        """Raises ValueError unless it is an integer of at least ``minimum``, or left out."""
        value = self._read(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 4e9 is what people write
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, value, f"an integer of at least {minimum}")
        return value

    def error(self, name: str, value: Any, expected: str) -> ValueError:
        """The complaint about one setting; ``expected`` says what would work."""
        return ValueError(f"kv_connector_extra_config of {self._name}: {name} is {value!r}; it must be {expected}")

    def check_all_read(self) -> None:
        """Raises TypeError if there are settings that were not read. Warns of fields that have no meaning here."""
        for name in self._content:
            if name not in self._known:
                raise unknown_keyword(f"kv_connector_extra_config of {self._name}", name, self._known)
        for name in _FOR_OTHERS:
            if getattr(self._config, name) is not None:
                logger.warning("kv_transfer_config: %s has no meaning for %s", name, self._name)

    def _read(self, name: str) -> Any:
        self._known.append(name)
        return self._content.get(name)

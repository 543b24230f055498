"""What a connector reads from its ``kv_connector_extra_config``, checked, so that no setting is ignored. No torch."""

from __future__ import annotations

import logging
import os
from typing import Any

from fleetfoot.config.json_record import check_key
from fleetfoot.config.kv_transfer import KVTransferConfig

logger = logging.getLogger(__name__)

MAX_THREADS = 1024
"""Of one kind on a rank; more of them wait for each other."""
FIELDS_FOR_OTHERS = ("kv_rank", "kv_parallel_size", "kv_ip", "kv_port", "kv_buffer_device", "kv_buffer_size")
"""Fields of a kv_transfer_config that no connector of Fleetfoot's own has a use for."""


class ConnectorSettings:
    """Typed reads from the settings of one connector.

    Args:
        config: the connector's.
    """

    def __init__(self, config: KVTransferConfig) -> None:
        self._name = config.kv_connector
        self._content = dict(config.kv_connector_extra_config)
        self._known: list[str] = []

    def text(self, name: str) -> str | None:
        """Raises ValueError unless it is a string that is not empty, a path, or left out."""
        value = self._read(name)
        if isinstance(value, os.PathLike):  # scripts pass either
            value = os.fspath(value)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(name, value, "a string that is not empty")
        return value

    def integer(self, name: str, default: int | None, *, minimum: int = 1, maximum: int | None = None) -> int | None:
        """Raises ValueError unless it is an integer from ``minimum`` to ``maximum`` (None: no limit), or left out."""
        value = self._read(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 4e9 is what people write
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, value, f"an integer of at least {minimum}")
        if maximum is not None and value > maximum:
            raise self.error(name, value, f"at most {maximum}")
        return value

    def error(self, name: str, value: Any, expected: str) -> ValueError:
        """The complaint about one setting; ``expected`` says what would work."""
        return ValueError(f"kv_connector_extra_config of {self._name}: {name} is {value!r}; it must be {expected}")

    def check_all_read(self) -> None:
        """Raises TypeError if there are settings that were not read."""
        for name in self._content:
            check_key(f"kv_connector_extra_config of {self._name}", name, self._known)

    def _read(self, name: str) -> Any:
        self._known.append(name)
        return self._content.get(name)


def tell_of_unused_fields(config: KVTransferConfig) -> None:
    """Warn of those of FIELDS_FOR_OTHERS that are set."""
    for name in FIELDS_FOR_OTHERS:
        if getattr(config, name) is not None:
            logger.warning("kv_transfer_config: %s has no meaning for %s", name, config.kv_connector)

"""Connectors by name: which class a ``kv_transfer_config`` means. Modules are imported only when they are used."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import KVConnector

CONNECTORS: Mapping[str, tuple[str, str]] = {
    "SharedStorageConnector": ("fleetfoot.kv_transfer.blockstore.filesystem", "SharedStorageConnector"),
    "FilesystemConnector": ("fleetfoot.kv_transfer.blockstore.filesystem", "SharedStorageConnector"),
    "OffloadingConnector": ("fleetfoot.kv_transfer.blockstore.offload", "OffloadingConnector"),
    "NixlConnector": ("fleetfoot.kv_transfer.nixl.connector", "NixlConnector"),
    "MultiConnector": ("fleetfoot.kv_transfer.multi.connector", "MultiConnector"),
}
"""What ``kv_connector`` may say -> module and class; `fleetfoot.kv_transfer.base.layouts.KNOWN_CONNECTORS` has the same
names."""


def find_connector(config: KVTransferConfig) -> type[KVConnector]:
    """The class of an active config: one of Fleetfoot's own, or, with ``kv_connector_module_path``, somebody else's.

    Raises:
        ValueError: there is no such connector, or it cannot be imported, or it is not a `KVConnector`.
    """
    name = config.kv_connector or ""
    if config.kv_connector_module_path is not None:
        module_path, class_name = config.kv_connector_module_path, name
    elif name in CONNECTORS:
        module_path, class_name = CONNECTORS[name]
    else:
        raise ValueError(_unknown(name))
    try:
        found = getattr(import_module(module_path), class_name)
    except (ImportError, ValueError) as error:  # a ValueError of import_module is an empty or malformed path
        raise ValueError(
            f"kv_transfer_config: kv_connector {name!r} cannot be imported from {module_path} ({error})"
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"kv_transfer_config: kv_connector is {name!r}, but the module {module_path} has nothing of that name"
        ) from error
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise ValueError(
            f"kv_transfer_config: kv_connector {name!r} of {module_path} is no connector; it must be a class derived "
            "from fleetfoot.kv_transfer.base.connector.KVConnector"
        )
    return found


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, CONNECTORS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"kv_transfer_config: kv_connector is {name!r}, which is not known; {hint}known are {', '.join(CONNECTORS)}; "
        "for a class of your own give its module as kv_connector_module_path"
    )

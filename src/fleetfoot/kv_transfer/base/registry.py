"""Connectors by name: their classes, the KV layouts that they accept, and connectors that combine several. No torch.

Modules of connectors are imported when they are used.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import UNUSED_FIELDS, KVConnector

OFFLOADING_CONNECTOR = "OffloadingConnector"
"""The connector that ``kv_offloading_size`` implies."""
CPU_BYTES = "cpu_bytes_to_use"
"""The setting of the offloading connector that ``kv_offloading_size`` sets, in bytes."""
MULTI_CONNECTOR = "MultiConnector"
PARTS = "connectors"
"""The multi connector's setting that lists the kv_transfer_configs of its parts."""
_INHERITED = ("kv_role", "engine_id", "kv_load_failure_policy", "kv_transfer_timeout")

CONNECTORS: Mapping[str, str] = {
    "ExampleConnector": "fleetfoot.kv_transfer.example:ExampleConnector",
    OFFLOADING_CONNECTOR: "fleetfoot.kv_transfer.blockstore.connector:OffloadingConnector",
    "NixlConnector": "fleetfoot.kv_transfer.nixl.connector:NixlConnector",
    "SharedStorageConnector": "fleetfoot.kv_transfer.blockstore.connector:SharedStorageConnector",
    "FilesystemConnector": "fleetfoot.kv_transfer.blockstore.connector:SharedStorageConnector",
    MULTI_CONNECTOR: "fleetfoot.kv_transfer.multi:MultiConnector",
}
"""``kv_connector`` -> module and class."""
_REGISTERED: dict[str, str] = {}
"""The same for classes that are not Fleetfoot's own; see `register_connector`."""
_ADAPTER = "fleetfoot.kv_transfer.vllm.adapter"


# --- classes and layouts --------------------------------------------------------------------------------------------


class _NotFoundError(Exception):
    """The end of a sentence that begins with the connector's name."""


def _lookup(config: KVTransferConfig) -> Any:
    """What an active config names; it may not be a connector."""
    name = config.kv_connector or ""
    if config.kv_connector_module_path is not None:
        module_path, class_name = config.kv_connector_module_path, name
    elif name in CONNECTORS:
        module_path, _, class_name = CONNECTORS[name].partition(":")
    else:
        near = difflib.get_close_matches(name, [*CONNECTORS, *_REGISTERED], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join([*CONNECTORS, *_REGISTERED])
        own = "for a class of your own give its module as kv_connector_module_path"
        raise _NotFoundError(f"is not known; {hint}known are {known}; {own}")
    try:
        module = import_module(module_path)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the path is empty or malformed
        raise _NotFoundError(f"cannot be imported from {module_path} ({error})") from error
    if not hasattr(module, class_name):
        raise _NotFoundError(f"cannot be imported: the module {module_path} has nothing of that name")
    return getattr(module, class_name)


def lookup_connector(config: KVTransferConfig) -> Any:
    """What a config names. Raises ValueError: it is unknown, or cannot be imported."""
    try:
        return _lookup(config)
    except _NotFoundError as error:
        raise ValueError(f"kv_transfer_config: kv_connector {config.kv_connector!r} {error}") from error


def _adapted(found: Any) -> Any:
    """A `KVConnector` of a class of vLLM's; all else as it is."""
    if not isinstance(found, type) or issubclass(found, KVConnector):
        return found
    return import_module(_ADAPTER).adapted(found)


def find_connector(config: KVTransferConfig) -> type[KVConnector]:
    """The class of an active config: one of `CONNECTORS`, or a class in ``kv_connector_module_path``. A class with
    vLLM's base class is adapted. Raises ValueError if the connector is unknown, cannot be imported, or is neither."""
    found = _adapted(lookup_connector(config))
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        module = f" of {config.kv_connector_module_path}" if config.kv_connector_module_path else ""
        raise ValueError(
            f"kv_transfer_config: kv_connector {config.kv_connector!r}{module} is no connector; it must be a class "
            "derived from fleetfoot.kv_transfer.base.connector.KVConnector, or from "
            "fleetfoot.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"
        )
    return found


def register_connector(name: str, module_path: str, class_name: str) -> None:
    """Let ``kv_connector`` name a class in another module. Raises ValueError: the name is in use."""
    if name in CONNECTORS or name in _REGISTERED:
        raise ValueError(f"the KV connector {name!r} is registered already; choose another name")
    _REGISTERED[name] = f"{module_path}:{class_name}"


def with_modules(config: KVTransferConfig) -> KVTransferConfig:
    """``config`` with the modules of registered names, so that worker processes find them. Raises as `part_configs`."""
    if config.kv_connector_module_path is not None:
        return config
    if config.kv_connector == MULTI_CONNECTOR:
        parts = tuple(with_modules(part) for part in part_configs(config))
        return dataclasses.replace(config, kv_connector_extra_config={PARTS: parts})
    if config.kv_connector not in _REGISTERED:
        return config
    module_path, _, class_name = _REGISTERED[config.kv_connector].partition(":")
    return dataclasses.replace(config, kv_connector=class_name, kv_connector_module_path=module_path)


@dataclass(frozen=True, slots=True)
class ConnectorLayouts:
    """The KV layouts that a connector accepts."""

    name: str
    accepted: frozenset[str] = frozenset()
    remark: str = ""
    """Why ``accepted`` is empty, as the end of a sentence that begins with the connector's name."""
    exists: bool = True
    """Whether the connector is known and can be imported."""


def connector_layouts(config: KVTransferConfig, engine: EngineConfig) -> ConnectorLayouts:
    """The layouts that the class of an active config declares as ``accepted_kv_layouts``, or a class of vLLM's by
    ``get_required_kvcache_layout``.

    A class without a declaration, and an unknown connector, accept none. Several connectors accept what all of them
    accept. Raises ValueError or TypeError if the settings of several connectors are invalid, or a class of vLLM's
    requires a layout that does not exist.
    """
    name = config.kv_connector or ""
    if name == MULTI_CONNECTOR and config.kv_connector_module_path is None:
        parts = [connector_layouts(part, engine) for part in part_configs(config)]
        accepted = frozenset.intersection(*(part.accepted for part in parts))
        if accepted:
            return ConnectorLayouts(name, accepted)
        least = min(parts, key=lambda part: (part.exists, len(part.accepted)))  # connectors that do not exist first
        if not least.accepted:
            return least
        listed = "; ".join(f"{part.name} accepts {', '.join(sorted(part.accepted))}" for part in parts)
        return ConnectorLayouts(name, remark=f"combines connectors without a common KV layout ({listed})")
    try:
        found = _adapted(_lookup(config))
    except _NotFoundError as error:
        return ConnectorLayouts(name, remark=str(error), exists=False)
    declared = getattr(found, "accepted_kv_layouts", None)
    if hasattr(found, "required_kv_layouts"):
        declared = found.required_kv_layouts(config, engine)
    if isinstance(declared, Set | list | tuple):
        return ConnectorLayouts(name, frozenset(declared))
    reason = "it has no accepted_kv_layouts"
    if declared is not None:
        reason = f"its accepted_kv_layouts is {declared!r}; it must be a set of names"
    return ConnectorLayouts(name, remark=f"does not say which KV layouts it accepts ({reason})")


# --- several connectors ---------------------------------------------------------------------------------------------


def part_configs(config: KVTransferConfig) -> tuple[KVTransferConfig, ...]:
    """The configs of a multi connector's parts; role, engine id, policy and timeout default to those of the whole.
    Raises ValueError or TypeError if there are no parts, a part is invalid, or its role contradicts that of the
    whole."""
    extra = config.kv_connector_extra_config
    listed = extra.get(PARTS)
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(
            f"kv_transfer_config: {MULTI_CONNECTOR} needs kv_connector_extra_config {{{PARTS!r}: [...]}} with the "
            f"settings of at least one connector, and it is {listed!r}"
        )
    unknown = sorted(str(name) for name in extra if name != PARTS)
    if unknown:
        raise ValueError(
            f"kv_transfer_config: {MULTI_CONNECTOR} accepts {PARTS!r} only, and kv_connector_extra_config also has "
            f"{', '.join(unknown)}; settings of one of the connectors belong into its own config"
        )
    parts = tuple(_part(config, index, value) for index, value in enumerate(listed))
    if [part.kv_connector for part in parts].count("NixlConnector") > 1:
        raise ValueError(
            f"kv_transfer_config: {MULTI_CONNECTOR} has NixlConnector twice; configure it once, as kv_both"
        )
    return parts


def _part(config: KVTransferConfig, index: int, value: Any) -> KVTransferConfig:
    where = f"kv_transfer_config: connector {index} of {MULTI_CONNECTOR}"
    if isinstance(value, dict):
        inherited = {name: getattr(config, name) for name in _INHERITED}
        value = {**{name: given for name, given in inherited.items() if given is not None}, **value}
    elif not isinstance(value, KVTransferConfig):
        raise TypeError(f"{where} is {value!r}; it must be an object with the fields of a kv_transfer_config")
    part = KVTransferConfig.parse(value)
    if part.kv_connector is None:
        raise ValueError(f"{where} has no kv_connector; name one")
    if part.kv_load_failure_policy != config.kv_load_failure_policy:
        raise ValueError(
            f"{where} has kv_load_failure_policy {part.kv_load_failure_policy!r}, and the whole has "
            f"{config.kv_load_failure_policy!r}; the policy is one for all, so set it for the whole only"
        )
    if config.kv_role not in (None, "kv_both", part.kv_role):
        raise ValueError(
            f"{where} has kv_role {part.kv_role!r}, and the whole has {config.kv_role!r}; leave the connector's out, "
            "or set the whole's to kv_both"
        )
    return part if part.kv_role is not None else dataclasses.replace(part, kv_role=config.kv_role)


def names_connector(config: KVTransferConfig, name: str) -> bool:
    """Whether a config names the connector ``name``, directly or among its parts at any depth. Raises as
    `part_configs`."""
    if config.kv_connector != MULTI_CONNECTOR or config.kv_connector_module_path is not None:
        return config.kv_connector == name
    return any(names_connector(part, name) for part in part_configs(config))


def joined(first: KVTransferConfig, config: KVTransferConfig) -> KVTransferConfig:
    """A multi connector of ``first`` and ``config``, with the policy, timeout and engine id of ``config``."""
    first = dataclasses.replace(first, **{name: getattr(config, name) for name in _INHERITED if name != "kv_role"})
    unused: dict[str, Any] = dict.fromkeys(UNUSED_FIELDS)  # ``config`` keeps them
    return dataclasses.replace(
        config,
        kv_connector=MULTI_CONNECTOR,
        kv_role="kv_both",
        kv_connector_module_path=None,
        kv_connector_extra_config={PARTS: (first, config)},
        **unused,
    )

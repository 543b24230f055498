"""Layouts of the KV cache by name, and which of them connectors accept. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from importlib import import_module

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.multi_config import MULTI_CONNECTOR, part_configs

BLOCK_CONTIGUOUS_HND = "block-contiguous-hnd"
"""`fleetfoot.records.kv_layout.KVLayout`: a block of a layer is one piece of memory, and within it the tokens of a
head lie side by side (heads, then tokens, then elements)."""

V2_LAYOUT = BLOCK_CONTIGUOUS_HND
"""What Model Runner V2 keeps its KV in."""

LAYOUT_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    BLOCK_CONTIGUOUS_HND: ("num_blocks", "key_and_value", "num_kv_heads", "block_size", "head_dim")
}
"""The dimensions of a layer's tensor, outermost first."""

OFFLOADING_CONNECTOR = "OffloadingConnector"
"""What ``kv_offloading_size`` implies."""

CPU_BYTES = "cpu_bytes_to_use"
"""The setting of the offloading connector that ``kv_offloading_size`` stands for, in bytes."""

KNOWN_CONNECTORS: Mapping[str, frozenset[str]] = {
    OFFLOADING_CONNECTOR: frozenset({BLOCK_CONTIGUOUS_HND}),
    "NixlConnector": frozenset({BLOCK_CONTIGUOUS_HND}),
    "SharedStorageConnector": frozenset({BLOCK_CONTIGUOUS_HND}),
    "FilesystemConnector": frozenset({BLOCK_CONTIGUOUS_HND}),
    MULTI_CONNECTOR: frozenset({BLOCK_CONTIGUOUS_HND}),
}
"""Connector -> the layouts that it accepts; of several connectors, all that they have in common."""

DECLARATION = "accepted_kv_layouts"
"""The class attribute in which a connector of somebody else's lists the names of the layouts that it accepts."""


@dataclass(frozen=True, slots=True)
class ConnectorLayouts:
    """What is known of a connector."""

    name: str
    accepted: frozenset[str]
    """Names of layouts."""
    remark: str = ""
    """Why ``accepted`` is empty, as the end of a sentence that begins with the connector's name."""
    exists: bool = True
    """Whether there is such a connector at all."""


def connector_layouts(config: KVTransferConfig) -> ConnectorLayouts:
    """The layouts that the connector of an active config accepts.

    A connector given by ``kv_connector_module_path`` is imported and asked; one that declares nothing, and one that is
    not known here, accepts none. Of several connectors, those that refuse a layout decide.

    Raises:
        ValueError, TypeError: the settings of several connectors are not as they must be.
    """
    name = config.kv_connector or ""
    if config.kv_connector_module_path is not None:
        return _ask_class(name, config.kv_connector_module_path)
    if name == MULTI_CONNECTOR:
        return _in_common([connector_layouts(part) for part in part_configs(config)])
    if name in KNOWN_CONNECTORS:
        return ConnectorLayouts(name, KNOWN_CONNECTORS[name])
    known = ", ".join(KNOWN_CONNECTORS)
    return ConnectorLayouts(name, frozenset(), f"is not known here (known are {known})", exists=False)


def _in_common(parts: list[ConnectorLayouts]) -> ConnectorLayouts:
    accepted = frozenset.intersection(*(part.accepted for part in parts))
    for part in sorted(parts, key=lambda part: part.exists):  # first those that are not there
        if V2_LAYOUT not in part.accepted:
            return ConnectorLayouts(part.name, accepted, part.remark, part.exists)
    return ConnectorLayouts(MULTI_CONNECTOR, accepted)


def _ask_class(name: str, module_path: str) -> ConnectorLayouts:
    try:
        connector = getattr(import_module(module_path), name)
    except (ImportError, AttributeError, ValueError) as error:
        remark = f"cannot be imported from {module_path} ({error})"
        return ConnectorLayouts(name, frozenset(), remark, exists=False)
    declared = getattr(connector, DECLARATION, None)
    if declared is None:
        remark = f"does not say which KV layouts it accepts (it has no {DECLARATION})"
        return ConnectorLayouts(name, frozenset(), remark)
    if not isinstance(declared, Set | list | tuple):
        remark = (
            f"does not say which KV layouts it accepts (its {DECLARATION} is {declared!r}; it must be a set of names)"
        )
        return ConnectorLayouts(name, frozenset(), remark)
    return ConnectorLayouts(name, frozenset(declared))

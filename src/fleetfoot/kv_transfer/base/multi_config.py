"""The settings of a connector that is made of several, one by one. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.settings import FIELDS_FOR_OTHERS

MULTI_CONNECTOR = "MultiConnector"
PARTS = "connectors"
"""The setting in ``kv_connector_extra_config`` that lists the parts, each with the fields of a kv_transfer_config."""

_INHERITED = ("kv_role", "engine_id", "kv_load_failure_policy", "kv_transfer_timeout")


def part_configs(config: KVTransferConfig) -> tuple[KVTransferConfig, ...]:
    """The parts' settings; what a part leaves out of role, engine id and timeout it has from the whole.

    Raises:
        ValueError, TypeError: there are no parts, or what is listed is none, or their roles contradict the whole's.
    """
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
            f"kv_transfer_config: {MULTI_CONNECTOR} knows {PARTS!r} alone, and kv_connector_extra_config also has "
            f"{', '.join(unknown)}; what is meant for one of the connectors belongs into its own"
        )
    return tuple(_part(config, index, value) for index, value in enumerate(listed))


def names_connector(config: KVTransferConfig, name: str) -> bool:
    """Whether a config means the connector ``name``, or has it among its parts, or among theirs.

    Raises:
        ValueError, TypeError: as `part_configs`.
    """
    if config.kv_connector != MULTI_CONNECTOR or config.kv_connector_module_path is not None:
        return config.kv_connector == name
    return any(names_connector(part, name) for part in part_configs(config))


def joined(first: KVTransferConfig, config: KVTransferConfig) -> KVTransferConfig:
    """A config that has ``first`` run beside what ``config`` says, whose policy, timeout and engine id count."""
    first = dataclasses.replace(first, **{name: getattr(config, name) for name in _INHERITED if name != "kv_role"})
    unused: dict[str, Any] = dict.fromkeys(FIELDS_FOR_OTHERS)  # they are for the connector that was asked for
    return dataclasses.replace(
        config,
        kv_connector=MULTI_CONNECTOR,
        kv_role="kv_both",
        kv_connector_module_path=None,
        kv_connector_extra_config={PARTS: (first, config)},
        **unused,
    )


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
            f"{config.kv_load_failure_policy!r}; the policy is one for all, so set it outside alone"
        )
    if config.kv_role not in (None, "kv_both", part.kv_role):
        raise ValueError(
            f"{where} has kv_role {part.kv_role!r}, and the whole has {config.kv_role!r}; leave the connector's out, "
            "or make the whole's kv_both"
        )
    return part if part.kv_role is not None else dataclasses.replace(part, kv_role=config.kv_role)

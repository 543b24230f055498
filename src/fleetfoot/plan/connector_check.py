"""Whether a connector takes its settings, asked when an engine is planned and nothing is started yet. No torch."""

from __future__ import annotations

from fleetfoot.kv_transfer.base.layouts import connector_layouts
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.plan.connector_context import transfer_context
from fleetfoot.plan.oracle import active_connector
from fleetfoot.plan.plan import EnginePlan


def check_connector(plan: EnginePlan) -> None:
    """Have the active connector check its settings: `fleetfoot.kv_transfer.base.connector.KVConnector.check_settings`.

    Of a connector that does not exist the plan's decision tells already.

    Raises:
        ValueError, TypeError: it refuses them, or it is no connector.
    """
    config = active_connector(plan.config)
    if config is None or not connector_layouts(config).exists:
        return
    find_connector(config).check_settings(transfer_context(plan, config, block_size=plan.config.block_size))

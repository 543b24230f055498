"""Settings, the environment, and facts of models."""

from typing import TYPE_CHECKING

from fleetfoot.compat.paths import provide_names

if TYPE_CHECKING:
    from fleetfoot.config.kv_transfer import KVTransferConfig as KVTransferConfig

provide_names(__name__)

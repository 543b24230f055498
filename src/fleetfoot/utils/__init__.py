"""Small helpers without dependencies on other packages of Fleetfoot."""

from typing import TYPE_CHECKING

from fleetfoot.utils.vllm_paths import provide_names

if TYPE_CHECKING:
    from fleetfoot.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser
    from fleetfoot.utils.network_utils import get_open_port as get_open_port

provide_names(__name__)

"""Small helpers without dependencies on other packages of Fleetfoot."""

from fleetfoot.utils.vllm_paths import provide_names

provide_names(__name__)

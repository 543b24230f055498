"""Small helpers without dependencies on other packages of Fleetfoot."""

from importlib import import_module

import_module("fleetfoot.compat.paths").provide_names(__name__)  # an upper room

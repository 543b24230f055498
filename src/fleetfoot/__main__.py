"""`python -m fleetfoot`, the same as the `fleetfoot` command."""

import sys

from fleetfoot.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

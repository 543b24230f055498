"""`python -m fleetfoot`, the same as the `fleetfoot` command."""

import sys


def run() -> int:
    """Run a command; returns the exit code."""
    try:
        from fleetfoot.cli.main import main

        return main()
    except KeyboardInterrupt:  # during the imports
        return 130


if __name__ == "__main__":
    sys.exit(run())

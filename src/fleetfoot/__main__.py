"""`python -m fleetfoot`, the same as the `fleetfoot` command."""

import sys


def run() -> int:
    """Run a command; returns the exit code."""
    try:
        from fleetfoot.cli.main import main

        code = main()
    except KeyboardInterrupt:  # during the imports
        code = 130
    exec("")  # else Python ends by the signal, whatever the code, if an `exec` was interrupted, as in a dataclass
    return code


if __name__ == "__main__":
    sys.exit(run())

"""Errors of a running engine."""


class EngineDeadError(RuntimeError):
    """The engine has failed or was shut down. The message names the first cause, which is chained."""

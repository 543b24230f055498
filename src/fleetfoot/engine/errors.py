"""Errors of a running engine."""


class EngineDeadError(RuntimeError):
    """The engine has failed or was shut down. The first cause is chained to it and named in the message."""

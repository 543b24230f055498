"""Which attention backend and operations a device runs on, by name, known without loading any of them."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.plan.machine import Machine


@dataclass(frozen=True, slots=True)
class Backends:
    """Names of what `fleetfoot.kernels.select` and `fleetfoot.kernels.select` take on that device."""

    attention: str
    ops: str

    @property
    def is_capturable(self) -> bool:
        """Whether graphs can hold the attention (`AttentionBackend.is_capturable`)."""
        return self.attention not in ("sdpa", "native")


def choose_backends(device: str, machine: Machine) -> Backends:
    """The backends of a machine's ``cpu`` or ``cuda``."""
    if device == "cpu" and machine.has_native:
        return Backends(attention="native", ops="native")
    if device == "cuda" and machine.has_triton:
        return Backends(attention="triton", ops="triton")
    return Backends(attention="sdpa", ops="torch")

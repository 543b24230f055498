"""``compilation_config``: whether the model goes through torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleetfoot.config.json_record import checked_object

COMPILATION_MODES = ("NONE", "STOCK_TORCH_COMPILE")
"""By their numbers, 0 and 1, or by their names."""


@dataclass(frozen=True, slots=True)
class CompilationConfig:
    """What ``--compilation-config`` says; names as in vLLM."""

    mode: str | int = "NONE"
    """One of COMPILATION_MODES, by name or number; afterwards it is the name."""

    def __post_init__(self) -> None:
        mode = self.mode
        if isinstance(mode, int) and not isinstance(mode, bool) and 0 <= mode < len(COMPILATION_MODES):
            mode = COMPILATION_MODES[mode]
        if mode not in COMPILATION_MODES:
            known = ", ".join(f"{number} or {name}" for number, name in enumerate(COMPILATION_MODES))
            raise ValueError(f"compilation_config: mode is {self.mode!r}; it can be {known}")
        object.__setattr__(self, "mode", mode)

    @classmethod
    def parse(cls, value: Any) -> CompilationConfig:
        """From a dictionary or JSON text.

        Raises:
            TypeError, ValueError: it is neither, or has a key or value that means nothing; says which.
        """
        return value if isinstance(value, cls) else cls(**checked_object("compilation_config", value, cls))

    @property
    def uses_torch_compile(self) -> bool:
        return self.mode == "STOCK_TORCH_COMPILE"

"""A process that says nothing."""

from __future__ import annotations

import sys

SILENT = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
"""Its command. It ends with its input."""

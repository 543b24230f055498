"""What tests send to Ray's actors, which import it."""

from __future__ import annotations

import os
from typing import Any


def where(worker: Any) -> tuple[int, str]:
    """The process and the node of a rank."""
    import ray

    return os.getpid(), ray.get_runtime_context().get_node_id()


class Body:
    """A request of Ray's protocol, as pydantic models are used."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return self.fields

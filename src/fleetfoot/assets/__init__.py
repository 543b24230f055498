"""The model that the package carries."""

from __future__ import annotations

from pathlib import Path


def embedded_model_path() -> Path:
    """The folder of the embedded model, in Hugging Face format."""
    return Path(__file__).parent / "story-llama"

"""The model that the package includes, and its EAGLE head."""

from __future__ import annotations

from pathlib import Path


def embedded_model_path() -> Path:
    """The folder of the embedded model, in Hugging Face format."""
    return Path(__file__).parent / "story-llama"


def embedded_eagle_path() -> Path:
    """The folder of the embedded model's EAGLE head, a drafter for it."""
    return Path(__file__).parent / "story-llama-eagle"

"""Prompts; vLLM's import path for them."""

from fleetfoot.records.prompts import ChatMessage, PromptType, TextPrompt, TokensPrompt

__all__ = ["ChatMessage", "PromptType", "TextPrompt", "TokensPrompt"]

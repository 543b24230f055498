"""vLLM's names and paths, where they are not those of this package."""

"""A page for browsers at ``/``: a chat, and a view of the engine as it works. docs/serving.md describes it."""

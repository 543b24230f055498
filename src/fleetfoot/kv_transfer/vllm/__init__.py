"""Connectors that are written for vLLM: its base class, the records that its methods get, and the adapter."""

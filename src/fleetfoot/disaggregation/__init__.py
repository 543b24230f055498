"""Prefill on one engine, decode on another: engines in processes of their own, and what sends requests to both."""

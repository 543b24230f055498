"""What requests return; vLLM's import path for it."""

from fleetfoot.records.outputs import CompletionOutput, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput"]

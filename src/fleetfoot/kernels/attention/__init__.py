"""Attention over the paged KV cache. No torch here: the memory plan uses the workspaces' sizes."""

MAX_GATHERED_ELEMENTS, MAX_MASK_ELEMENTS = 1 << 22, 1 << 21
"""Elements of K that the torch backend gathers at once for decodes, and of the mask of a chunk of a prefill."""
_FLOAT32 = 4


def sdpa_workspace_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_model_len: int, element_bytes: int
) -> int:
    """Bytes of the torch backend's largest step: K and V of one sequence, gathered and repeated for each query head,
    and the scores of a chunk of a prefill in float32 and as probabilities."""
    gathered = 2 * (num_heads + num_kv_heads) * head_dim * max_model_len * element_bytes
    scores = MAX_MASK_ELEMENTS * num_heads * (_FLOAT32 + element_bytes)
    return max(gathered + scores, 4 * MAX_GATHERED_ELEMENTS * element_bytes)

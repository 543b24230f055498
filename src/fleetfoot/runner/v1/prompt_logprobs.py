"""Logprobs of the prompt tokens of a step's chunks, for the requests that asked."""

from __future__ import annotations

import torch

from fleetfoot.models.interface import CausalLM
from fleetfoot.records.logprobs import RowLogprobs
from fleetfoot.runner.v1.host_state import HostState
from fleetfoot.runner.v1.inputs import StepInputs
from fleetfoot.sampling.logprobs import prompt_logprobs


def collect_prompt_logprobs(
    model: CausalLM, host: HostState, hidden: torch.Tensor, inputs: StepInputs
) -> dict[int, tuple[int, list[RowLogprobs]]]:
    """Batch index -> (position of the first, an entry for each prompt token that a position of this step predicts).

    Args:
        hidden: ``[num_tokens, hidden_size]``, in batch order.
    """
    found: dict[int, tuple[int, list[RowLogprobs]]] = {}
    for index, row in enumerate(inputs.rows.tolist()):
        request = host.request(row)
        wanted = request.params.prompt_logprobs
        if wanted is None:
            continue
        begin = int(host.num_computed[row] - inputs.query_lens[index])  # position of the chunk's first token
        count = min(int(inputs.query_lens[index]), request.num_prompt_tokens - 1 - begin)
        if count <= 0:
            continue  # a decode, or the prompt's last token alone, which predicts the first output token
        first = int(inputs.query_start_loc[index])
        targets = torch.from_numpy(host.token_ids[row, begin + 1 : begin + 1 + count]).to(hidden.device)
        tensors = prompt_logprobs(
            hidden[first : first + count], targets, wanted, model.compute_logits, model.config.vocab_size
        )
        found[index] = (begin + 1, tensors.to_rows())
    return found

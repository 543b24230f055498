"""Train the embedded model with a policy gradient, and watch its rollouts change.

Each round, Fleetfoot generates stories, the reward of a story is its share of words with an "o", and one step of
REINFORCE (Williams 1992) with the round's mean as baseline makes such words more probable. The engine then takes the
new weights in place. Needs `transformers`, which computes the gradients.

    python examples/policy_gradient.py --rounds 20
"""

from __future__ import annotations

import argparse
import re

import torch
from transformers import LlamaForCausalLM

from fleetfoot import LLM, RequestOutput, SamplingParams
from fleetfoot.assets import embedded_model_path

PROMPT = "Once there was a"


def reward(text: str) -> float:
    """The share of words that have an "o"."""
    words = re.findall(r"\w+", text.lower())
    return sum("o" in word for word in words) / max(1, len(words))


def policy_loss(policy: LlamaForCausalLM, rollouts: RequestOutput, temperature: float) -> torch.Tensor:
    """Mean over the rollouts of minus the advantage times the log-probability of the tokens."""
    rewards = torch.tensor([reward(output.text) for output in rollouts.outputs])  # [n]
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # [n]
    prompt = rollouts.prompt_token_ids
    losses = []
    for output, advantage in zip(rollouts.outputs, advantages, strict=True):
        tokens = torch.tensor([[*prompt, *output.token_ids]])  # [1, num_tokens]
        logits = policy(tokens).logits[0, len(prompt) - 1 : -1] / temperature  # [num_generated, vocab_size]
        chosen = logits.log_softmax(dim=-1).gather(1, tokens[0, len(prompt) :, None])  # [num_generated, 1]
        losses.append(-advantage * chosen.mean())
    return torch.stack(losses).mean()


def train(llm: LLM, rounds: int, rollouts: int, max_tokens: int, learning_rate: float) -> list[float]:
    """Returns the mean reward of each round's rollouts."""
    policy = LlamaForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    history = []
    for number in range(rounds):
        params = SamplingParams(n=rollouts, temperature=1.0, max_tokens=max_tokens, seed=number)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        history.append(sum(reward(each.text) for each in output.outputs) / rollouts)
        print(f"weights {output.weight_version}: reward {history[-1]:.2f}  {PROMPT}{output.outputs[0].text!r}")
        optimizer.zero_grad()
        policy_loss(policy, output, params.temperature).backward()
        optimizer.step()
        version = llm.reload_weights(policy.named_parameters(), check_finite=True)
        assert version == number + 1
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=32, help="stories of a round")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    arguments = parser.parse_args()
    with LLM(dtype="float32", max_model_len=128) as llm:
        history = train(llm, arguments.rounds, arguments.rollouts, arguments.max_tokens, arguments.learning_rate)
    print(f"the mean reward went from {history[0]:.2f} to {history[-1]:.2f}")


if __name__ == "__main__":
    main()

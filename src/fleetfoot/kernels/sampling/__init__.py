"""Operations of sampling: logits processors, sampling, logprobs."""

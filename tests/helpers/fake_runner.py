"""A runner without a model: it remembers which token was written to which KV slot, and checks every read."""

from __future__ import annotations

import hashlib

from fleetfoot.scheduler.output import ModelRunnerOutput, NewRequest, SchedulerOutput


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The fake model: any function of the whole sequence, so that a wrong token anywhere shows in all that follow."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def reference(prompt: list[int], max_tokens: int, stops: frozenset[int], min_tokens: int, vocab_size: int) -> list[int]:
    """The output of the fake model for a request that runs alone."""
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_tokens:
        token = next_token(token_ids, vocab_size)
        token_ids.append(token)
        if token in stops and len(token_ids) - len(prompt) >= min_tokens:
            break
    return token_ids[len(prompt) :]


class FakeRunner:
    """Executes steps in the order in which they are queued, as a device stream does."""

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: dict[int, int] = {}  # KV slot -> token
        self.rows: dict[int, NewRequest] = {}
        self.computed: dict[int, int] = {}
        self.num_steps = 0

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id, row in output.finished:
            assert self.rows.pop(row).request_id == request_id
        for request in output.new_requests:
            assert request.row not in self.rows, "a row was given out twice"
            self.rows[request.row] = request
            self.computed[request.row] = request.num_computed_tokens
        for row, start, block_ids in output.new_block_ids:
            assert start == len(self.rows[row].block_ids)
            self.rows[row].block_ids += block_ids
        self._check_groups(output)
        # all of a step's KV is written before any of it is read, layer by layer
        for row, count in zip(output.rows, output.num_scheduled_tokens, strict=True):
            self._write(row, count)
        sampled = []
        for index, row in enumerate(output.rows):
            request = self.rows[row]
            assert [self.slots[self._slot(row, p)] for p in range(self.computed[row])] == request.token_ids[
                : self.computed[row]
            ], "a KV block holds other tokens than its request's"
            is_complete = self.computed[row] == len(request.token_ids)
            assert is_complete == (index < output.num_sampled)
            if is_complete:
                token = next_token(request.token_ids, self.vocab_size)
                request.token_ids.append(token)
                sampled.append([token])
        self.num_steps += 1
        return ModelRunnerOutput(sampled)

    def _check_groups(self, output: SchedulerOutput) -> None:
        counts = output.num_scheduled_tokens
        assert len(counts) == len(output.rows) == len(set(output.rows))
        assert sum(counts) == output.total_num_scheduled_tokens
        assert all(count == 1 for count in counts[: output.num_decodes])
        assert min(counts) >= 1
        assert output.num_decodes <= output.num_sampled <= len(output.rows)

    def _slot(self, row: int, position: int) -> int:
        return self.rows[row].block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: int, count: int) -> None:
        begin = self.computed[row]
        for position in range(begin, begin + count):
            self.slots[self._slot(row, position)] = self.rows[row].token_ids[position]
        self.computed[row] = begin + count

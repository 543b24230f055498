"""A runner without a model: it records which token was written to which KV slot, and checks every read.

As a device it keeps the true lengths and what was computed; the scheduler's counts are bounds with drafts in flight.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field

from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup
from fleetfoot.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from fleetfoot.scheduler import states
from fleetfoot.scheduler.block_pool import BlockPools


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """The fake model: any function of the whole sequence, so that a wrong token anywhere shows in all that follow."""
    digest = hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def reference(
    prompt: Sequence[int], max_tokens: int, stops: frozenset[int], min_tokens: int, vocab_size: int
) -> list[int]:
    """The output of the fake model for a request that runs alone."""
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in stops and len(output) >= min_tokens):
        output.append(next_token([*prompt, *output], vocab_size))
    return output


@dataclass
class FakeRunner:
    """Executes steps in the order in which they are queued, as a device stream does."""

    block_size: int
    vocab_size: int
    _: KW_ONLY
    num_drafts: int = 0  # proposed for each request, in steps that propose
    accuracy: float = 0.7  # the probability that a proposal is the model's own token
    has_draft_kv: bool = False  # whether the drafter writes KV of its own for its proposals
    pools: BlockPools | None = None  # to check that no free block is written
    groups: tuple[KVGroup, ...] = ONE_GROUP
    seed: InitVar[int] = 0
    slots: dict[int, int] = field(default_factory=dict)  # KV slot -> token
    weights: int = 0  # the model's version of weights; others are loaded while it runs
    versions: dict[int, int] = field(default_factory=dict)  # KV slot -> the oldest weights behind its KV
    rows: dict[int, NewRequest] = field(default_factory=dict)  # their token_ids grow with what is sampled
    computed: dict[int, int] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)  # the oldest weights behind a row's KV
    drafts: dict[int, list[int]] = field(default_factory=dict)  # -1: nothing was found
    num_steps: int = 0
    parts: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """(group, block) -> offset -> token, of the groups after the first."""
    slabs: dict[int, int] = field(default_factory=dict)  # slab -> the group that writes to it
    tables: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (row, table, block) -> slot of a state
    states: dict[int, list[int]] = field(default_factory=dict)  # slot -> the tokens that it comes after

    def __post_init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_slots = self.groups[-1].num_slots if self.groups[-1].is_state else 0
        self._first_table = len(self.groups) - bool(self._num_slots)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.apply(output)
        return self.compute(output)

    def apply(self, output: SchedulerOutput) -> None:
        """Process finished and new requests, and new blocks."""
        for request_id, row in output.finished:
            assert self.rows.pop(row).request_id == request_id
        for request in output.new_requests:
            assert request.row not in self.rows, "a row was given out twice"
            self.rows[request.row] = request
            self.tables = {key: slot for key, slot in self.tables.items() if key[0] != request.row}
            self.computed[request.row] = request.num_computed_tokens
            self.oldest[request.row] = self.weights
            # the drafts of the row's previous request are still there
        for row, start, block_ids in output.new_block_ids:
            assert start == len(self.rows[row].block_ids)
            self.rows[row].block_ids += block_ids
        for group, row, start, block_ids in output.new_group_block_ids:
            if group >= self._first_table:
                self.tables[row, group - self._first_table, start] = block_ids[0]
                continue
            known = self.rows[row].group_block_ids[group - 1]
            assert start == len(known)
            known += block_ids
        for slab in output.changed_slabs:
            self.slabs.pop(slab, None)
            for slot in [slot for slot in self.states if self._slab(len(self.groups) - 1, slot) == slab]:
                del self.states[slot]
            for key in [key for key in self.parts if self._slab(*key) == slab]:
                del self.parts[key]
        self._check_groups(output)

    def compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        # all of a step's KV is written before any of it is read, layer by layer
        width = 1 + output.num_drafts
        self.begins = {row: self.computed[row] for row in output.rows}
        if self._num_slots:
            self._compute_states(output)
        for index, (row, count) in enumerate(zip(output.rows, output.num_scheduled_tokens, strict=True)):
            begin = self.computed[row]
            if index < output.num_decodes:
                assert begin == len(self.rows[row].token_ids) - 1, "a decode has more than one known token to compute"
                self._write(row, begin, [self.rows[row].token_ids[-1], *self.drafts_of(row, width - 1)])
            else:
                self._write(row, begin, self.rows[row].token_ids[begin : begin + count].tolist())
                self.computed[row] = begin + count
        for request in output.new_requests:
            for position in range(request.num_computed_tokens):
                version = self.versions[self._slot(request.row, position)]
                assert version == self.weights, "a request begins with KV of other weights"
        result = ModelRunnerOutput([])
        for index, row in enumerate(output.rows):
            request, computed = self.rows[row], self.computed[row]
            assert [self.slots[self._slot(row, p)] for p in range(computed)] == list(request.token_ids[:computed]), (
                "a KV block holds other tokens than its request's"
            )
            for group in range(1, self._first_table):
                self._check_window(group, row, self.begins[row], computed)
            if index < output.num_decodes:
                result.sampled_token_ids.append(self._verify(row, width - 1))
                if output.num_drafts:
                    result.num_drafted.append(sum(draft >= 0 for draft in self.drafts.get(row, [])[: width - 1]))
            else:
                is_complete = computed == len(request.token_ids)
                assert is_complete == (index < output.num_sampled)
                if is_complete:
                    result.sampled_token_ids.append(self._sample(row, 1))
        for row in output.rows[: output.num_sampled] if output.num_to_propose else []:
            self._propose(row, output.num_to_propose)
        self.num_steps += 1
        return result

    def drafts_of(self, row: int, count: int) -> list[int]:
        """What a decode verifies, as input ids."""
        drafts = self.drafts.get(row, [])[:count]
        return [max(draft, 0) for draft in drafts] + [0] * (count - len(drafts))

    def _sample(self, row: int, most: int) -> list[int]:
        """Up to ``most`` of the model's own tokens."""
        request = self.rows[row]
        most = min(most, request.max_total_tokens - len(request.token_ids))
        for _ in range(most):
            request.token_ids.append(next_token(request.token_ids, self.vocab_size))
        return request.token_ids[len(request.token_ids) - most :].tolist() if most else []

    def _verify(self, row: int, num_drafts: int) -> list[int]:
        new: list[int] = []
        for draft in [*self.drafts.get(row, [])[:num_drafts], -1]:
            token = self._sample(row, 1)
            new += token
            if token != [draft]:
                break
        self.computed[row] += len(new)
        return new

    def _propose(self, row: int, num_drafts: int) -> None:
        assert num_drafts == self.num_drafts
        request, rng = self.rows[row], self._rng
        guess = list(request.token_ids)
        for _ in range(num_drafts):
            is_right = rng.random() < self.accuracy
            guess.append(next_token(guess, self.vocab_size) if is_right else rng.randrange(-1, self.vocab_size))
        self.drafts[row] = guess[len(request.token_ids) :]
        if self.has_draft_kv:
            position = len(request.token_ids) - 1
            for behind in range(position, min(position + num_drafts, request.max_total_tokens - 1)):
                self._check_block(self._slot(row, behind))

    def _check_groups(self, output: SchedulerOutput) -> None:
        counts = output.num_scheduled_tokens
        assert len(counts) == len(output.rows) == len(set(output.rows))
        assert sum(counts) == output.total_num_scheduled_tokens
        assert all(count == 1 + output.num_drafts for count in counts[: output.num_decodes])
        assert output.num_drafts in (0, self.num_drafts)
        assert min(counts, default=1) >= 1
        assert output.num_decodes <= output.num_sampled <= len(output.rows)
        assert output.num_decodes or not output.num_drafts

    def _slot(self, row: int, position: int) -> int:
        return self.rows[row].block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: int, begin: int, token_ids: list[int]) -> None:
        """Those that are an input; from the last token on nothing is."""
        last = self.rows[row].max_total_tokens - 1
        self.oldest[row] = min(self.oldest[row], self.weights)
        for position, token in enumerate(token_ids[: max(0, last - begin)], start=begin):
            slot = self._slot(row, position)
            self._check_block(slot)
            self.slots[slot] = token
            self.versions[slot] = self.oldest[row]
            for group in range(1, self._first_table):
                block = self.rows[row].group_block_ids[group - 1][position // self.block_size]
                self._claim(group, block)
                self.parts.setdefault((group, block), {})[position % self.block_size] = token

    def _compute_states(self, output: SchedulerOutput) -> None:
        """Each request changes the state before its tokens; those after them are kept for what is read next."""
        read, written = set[int](), dict[int, list[int]]()
        for index, (row, count) in enumerate(zip(output.rows, output.num_scheduled_tokens, strict=True)):
            request, begin = self.rows[row], self.computed[row]
            before, places = request.token_ids[:begin].tolist(), [begin + count - 1]
            tokens = request.token_ids[begin : begin + count].tolist()
            if index < output.num_decodes:
                tokens = [request.token_ids[-1], *self.drafts_of(row, count - 1)]
                places = [each for each in range(begin, begin + count) if each < request.max_total_tokens - 1]
            if begin and places:
                read.add(slot := self._state_slot(row, begin - 1))
                assert self.states[slot] == before, "a state comes after other tokens than its request's"
            for place in places:
                slot = self._state_slot(row, place)
                assert slot not in written, "a state is written twice"
                assert slot not in read or slot == self._state_slot(row, begin - 1), "a state is read and written"
                self._claim(len(self.groups) - 1, slot)
                written[slot] = before + tokens[: place + 1 - begin]
        for row, count, slot in output.snapshots:
            assert slot not in written and slot not in read and count % states.CHUNK == 0
            assert (self.computed[row] + count) % self.block_size == 0, "a snapshot is not at the end of a block"
            self._claim(len(self.groups) - 1, slot)
            written[slot] = self.rows[row].token_ids[: self.computed[row] + count].tolist()
        own = {self._state_slot(row, self.computed[row] - 1) for row in output.rows if self.computed[row]}
        assert not (read - own) & written.keys()
        self.states.update(written)

    def _state_slot(self, row: int, position: int) -> int:
        return self.tables[row, position % self._num_slots, position // self.block_size]

    def _check_window(self, group: int, row: int, begin: int, end: int) -> None:
        """All that queries from ``begin`` on read is there."""
        window, token_ids = self.groups[group].window, self.rows[row].token_ids
        assert window is not None
        for position in range(max(0, begin + 1 - window), min(end, self.rows[row].max_total_tokens - 1)):
            block = self.rows[row].group_block_ids[group - 1][position // self.block_size]
            found = self.parts[group, block].get(position % self.block_size)
            assert found == token_ids[position], f"group {group} has another token at position {position}"

    def _check_block(self, slot: int) -> None:
        self._claim(0, slot // self.block_size)

    def _slab(self, group: int, block: int) -> int:
        return block // self.groups[group].blocks_per_slab

    def _claim(self, group: int, block: int) -> None:
        """A block is about to be written: it is in use, and its slab is its group's."""
        if self.pools is not None:
            assert self.pools.all[group].state(block) in ("FILLING", "READY", "HELD"), "written to a free block"
        if len(self.groups) > 1 and self.groups[group].has_layers:
            slab = self._slab(group, block)
            assert slab > 0, "the slab of zeros is written"
            assert self.slabs.setdefault(slab, group) == group, "a slab was not cleared for its group"

"""Layers over a tensor group: linear layers, split by outputs or by inputs, and the two ends of a model.

Both ends are split by tokens: each rank holds the rows of some. A lookup is summed over the ranks, all but one of which
add zeros. Logits are computed for a rank's own tokens and gathered. Each of them is computed by one rank and copied to
the others, so every rank has the same logits, bit by bit, and samples the same tokens from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import vocab_rows, vocab_span
from fleetfoot.kernels.linear.linear import PreparedLinear
from fleetfoot.layers.context import ModelContext, WeightModule
from fleetfoot.quantization.base import LinearShape, PreparedEmbedding
from fleetfoot.records.weights import Rows, Span, WeightSpec

_LM_HEAD = "lm_head"


class ColumnParallelLinear(WeightModule):
    """``x [n, in_features]`` -> ``x @ weight.T + bias [n, outputs of this rank]``.

    Several layers of the checkpoint that read the same input are one matrix product (q, k and v; gate and up).

    Args:
        in_features, parts: as in the checkpoint: input features, and each fused layer's name and output features.
        rows, columns: of each part the outputs that this rank computes, and the inputs that it has; None: all.
        padding: outputs after the others that are always 0.
        merged: the name of one tensor that has all parts in the checkpoint; None: each part has its own.
    """

    def __init__(
        self,
        context: ModelContext,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        bias: bool = False,
        *,
        rows: Sequence[Rows] | None = None,
        columns: slice | None = None,
        padding: int = 0,
        merged: str | None = None,
    ) -> None:
        super().__init__()
        own_rows: tuple[Rows, ...] = tuple(slice(0, size) for _, size in parts) if rows is None else tuple(rows)
        own_columns = columns or slice(0, in_features)
        shape = LinearShape(in_features, tuple(parts), own_rows, own_columns, bias, padding)
        shape = shape if merged is None else shape.merged(merged)
        method = context.linear_methods.of(f"{context.prefix}{name}" for name, _ in parts)
        self.weight = method.make_weight(shape, context.ops, context.dtype, context.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, inputs of this rank]`` -> ``[n, outputs of this rank]``."""
        return self.weight.apply(x)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        return self.weight.weight_specs(prefix)

    def own_stored_weights(self) -> Iterator[Span]:
        return self.weight.stored()

    def process_own_weights(self) -> None:
        self.weight.process_weights_after_loading()


class RowParallelLinear(ColumnParallelLinear):
    """``x [n, inputs of this rank]`` -> ``[n, out_features]``, complete on every rank.

    There are two ways over a tensor group. Split by inputs, each rank computes a part of a sum (Megatron-LM, Shoeybi et
    al. 2019): one all-reduce, and rounding that depends on the number of ranks. Split by outputs, the inputs are
    gathered before and the outputs after: two messages, and the bits of one rank. `TensorGroup.bitwise_reproducible`
    determines which. ``name``: in the checkpoint; ``inputs``: those of ``in_features`` that this rank has.
    """

    def __init__(
        self, context: ModelContext, name: str, in_features: int, out_features: int, bias: bool, inputs: slice
    ) -> None:
        group, parts = context.groups.tensor, ((name, out_features),)
        is_gathered = group.bitwise_reproducible and group.size > 1
        if is_gathered:
            rows, padding = padded_span(out_features, context)
            super().__init__(context, in_features, parts, bias, rows=(rows,), padding=padding)
        else:
            # the bias is once in the sum over the ranks
            super().__init__(context, in_features, parts, bias and group.is_first_rank, columns=inputs)
        self.group, self.is_gathered, self.has_bias = group, is_gathered, bias
        self._in_features, self._out_features = in_features, out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, inputs of this rank]`` -> ``[n, out_features]``."""
        partial = self.partial(x)
        return partial if self.is_gathered else self.group.all_reduce(partial)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, out_features]``: this rank's part of the sum over the group; the whole where it is gathered."""
        if not self.is_gathered:
            return self.weight.apply(x)
        whole = self.group.all_gather(x, self._in_features)
        return self.group.all_gather(self.weight.apply(whole), self._out_features)


def padded_span(size: int, context: ModelContext) -> tuple[slice, int]:
    """This rank's rows of ``size``, shared as the vocabulary is, and the rows of padding after them."""
    group = context.groups.tensor
    rows = vocab_span(size, group.rank, group.size)
    return rows, vocab_rows(size, group.size) - (rows.stop - rows.start)


class VocabParallelEmbedding(WeightModule):
    """``input_ids [num_tokens]`` -> ``[num_tokens, hidden_size]``. `tie` makes it the matrix of a head too."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self._group = context.groups.tensor
        self.vocab_size = config.vocab_size
        self._tokens, padding = padded_span(config.vocab_size, context)
        num_tokens = self._tokens.stop - self._tokens.start
        num_rows, is_shared = num_tokens + padding, self._group.size > 1
        self._row_of_token: torch.Tensor | None = None
        if is_shared:  # one more row, of zeros, for all tokens that other ranks hold
            self._row_of_token = torch.full((config.vocab_size,), num_rows, device=context.device)
            self._row_of_token[self._tokens] = torch.arange(num_tokens, device=context.device)
        method = context.linear_methods.of([f"{context.prefix}embed_tokens"])
        self.stored: PreparedEmbedding | None = None
        """An embedding that is no plain tensor in its checkpoint, nor here."""
        if method.stores_embeddings:
            sizes = config.vocab_size, config.hidden_size
            self.stored = method.make_embedding("embed_tokens", *sizes, context.ops, context.dtype)
        self._table: torch.Tensor | None = None
        if self.stored is None:
            table = torch.empty(num_rows + is_shared, config.hidden_size, dtype=context.dtype, device=context.device)
            table[num_tokens:] = 0  # padding too, which a tied head multiplies with
            self._table = table
        self._num_rows, self._hidden_size = num_rows, config.hidden_size
        self._prepare: Callable[[torch.Tensor], PreparedLinear] | None = None
        self._is_prepared = False
        self.prepared: PreparedLinear | None = None
        """The matrix of a tied head, once it is loaded."""
        # A tied checkpoint may hold the matrix under either name, or twice.
        self._aliases = (f"{_LM_HEAD}.weight",) if config.tie_word_embeddings else ()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [num_tokens]`` int64 -> ``[num_tokens, hidden_size]``."""
        if self.stored is not None:
            return self.stored.rows(input_ids)
        if self._table is None:
            assert self.prepared is not None
            return self.prepared.rows(input_ids)
        if self._row_of_token is None:
            return F.embedding(input_ids, self._table)
        return self._group.all_reduce(F.embedding(self._row_of_token[input_ids], self._table))

    @property
    def weight(self) -> torch.Tensor:
        """``[rows of this rank, hidden_size]``, to write to until a tied head is prepared."""
        if self._table is None:
            assert self.prepared is not None
            self._table = self.prepared.weight()
        self._is_prepared = False
        return self._table[: self._num_rows]

    @property
    def is_open(self) -> bool:
        """Whether it has a matrix of its own."""
        return self._table is not None

    def tie(self, prepare: Callable[[torch.Tensor], PreparedLinear]) -> None:
        """Be the matrix of a head, which ``prepare`` makes of the embedding's."""
        self._prepare = prepare

    def process_own_weights(self) -> None:
        """Prepare the matrix of a tied head. If rows can be looked up in it, it is the only one from then on."""
        if self.stored is not None:
            self.stored.process_weights_after_loading()
            return
        if self._prepare is None or self._is_prepared:
            return
        if self.prepared is None:
            self.prepared = self._prepare(self.weight)
        else:
            self.prepared.replace(self.weight)
        self._is_prepared = True
        if self.prepared.has_rows and not self.prepared.is_dense and self._row_of_token is None:
            self._table = None

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        if self.stored is not None:
            yield from self.stored.weight_specs(prefix)
            return
        num_tokens, size = self._tokens.stop - self._tokens.start, self._hidden_size
        part = () if self._row_of_token is None else (self._tokens, slice(0, size))
        # a tied matrix is prepared once it is filled: the largest weight is in memory twice before the others are there
        yield WeightSpec(
            f"{prefix}{name}.weight",
            (self.vocab_size, size),
            lambda: self.weight[:num_tokens],
            aliases=self._aliases,
            part=part,
            filled=self.process_own_weights,
        )

    def own_stored_weights(self) -> Iterator[Span]:
        if self.stored is not None:
            return self.stored.stored()
        return super().own_stored_weights() if self.is_open else iter(())

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As the matrix of a tied head: ``x [n, hidden_size]`` -> ``[n, rows of this rank]``."""
        if self.stored is not None:
            return self.stored.apply_unrounded(x)
        if self.prepared is None:
            raise RuntimeError("the logits head was called before process_weights_after_loading")
        return self.prepared.unrounded(x)


class LMHead(ColumnParallelLinear):
    """``hidden [n, hidden_size]`` -> logits ``[n, vocab_size]``, in float32 where the kernel can write it: rounded to
    bfloat16, the two most probable tokens are often equal."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        rows, padding = padded_span(config.vocab_size, context)
        parts = ((_LM_HEAD, config.vocab_size),)
        super().__init__(context, config.hidden_size, parts, rows=(rows,), padding=padding)
        self._group, self._vocab_size = context.groups.tensor, config.vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, hidden_size]`` -> logits ``[n, vocab_size]``."""
        return self._group.all_gather(self.weight.apply_unrounded(x), self._vocab_size)


class TiedLMHead(WeightModule):
    """Logits from the embedding's matrix, which is shared. Where a CPU packs it, the lookup reads the packed one if it
    can: the product over the whole vocabulary is the largest of a decode step."""

    def __init__(self, embedding: VocabParallelEmbedding, context: ModelContext) -> None:
        super().__init__()
        # in a tuple: a module's attribute would be a second path to the embedding
        self._embedding, self._vocab_size = (embedding,), embedding.vocab_size
        self._group = context.groups.tensor
        method = context.linear_methods.of([f"{context.prefix}{_LM_HEAD}"])
        if embedding.stored is None:
            embedding.tie(method.prepare_tied_head(context.ops))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, hidden_size]`` -> logits ``[n, vocab_size]``."""
        return self._group.all_gather(self._embedding[0].logits(x), self._vocab_size)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        """None: the embedding's spec fills both."""
        return iter(())

    def own_stored_weights(self) -> Iterator[Span]:
        prepared = self._embedding[0].prepared
        if prepared is not None and not prepared.is_dense:  # else the embedding has it
            yield prepared.stored()

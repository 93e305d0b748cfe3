"""What training minimises: the loss of each token or row of a batch, and its weight.

next token     nll of each token given those before it
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.data import Batch
from jaxformer.losses import cross_entropy, in_blocks
from jaxformer.masks import Mask
from jaxformer.pairs import Pairs

Objective = Callable[[nn.Module, Any, Any, Array | None], tuple[Array, Array]]
"""(model, params, batch, dropout_key or None) -> (loss of each token or row, its weight)."""


def next_token(
    model: nn.Module,
    params: Any,
    batch: Batch,
    dropout_key: Array | None = None,
    *,
    block: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """The causal language model's objective: nats of each label, and its weight.

    Args:
      block: tokens of a row of which logits [B block V] exist at a time; the backward pass makes them again, which
        costs one more product with the head. None: those of all tokens, [B T V].
      label_smoothing, z_loss: as of `losses.cross_entropy`.
    """
    apply: Callable[..., Any] = partial(model.apply, {"params": params}, rngs=_rngs(dropout_key))
    positions, segments = batch.positions, batch.segments
    # Positions of a batch count up within each segment, which kernels that know only indices rely on.
    mask = Mask(positions, positions, segments, segments, causal=True, ordered=True)
    x, _ = apply(batch.ids, positions, segments, mask, method="hidden")

    def loss(x: Float[Array, "B C D"], labels: Int[Array, "B C"]) -> Float[Array, "B C"]:
        logits = apply(x, method="unembed")
        return cross_entropy(logits, labels, label_smoothing=label_smoothing, z_loss=z_loss)

    losses = loss(x, batch.labels) if block is None else in_blocks(loss, block, x, batch.labels)
    return losses, batch.weights


def masked_token(
    model: nn.Module, params: Any, batch: Batch, dropout_key: Array | None = None
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """A masked language model's objective; the batch holds ids with some of them hidden, and the right ones as labels.

    See `corruption.mask_tokens`, whose `chosen` tokens have weight.
    """
    apply: Callable[..., Any] = partial(model.apply, {"params": params}, rngs=_rngs(dropout_key))
    return cross_entropy(apply(batch.ids, batch.positions, batch.segments), batch.labels), batch.weights


def sequence_to_sequence(
    model: nn.Module,
    params: Any,
    pairs: Pairs,
    dropout_key: Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """An encoder-decoder's objective: translation, and putting back what a corrupted text lacks."""
    apply: Callable[..., Any] = partial(model.apply, {"params": params}, rngs=_rngs(dropout_key))
    target = pairs.target
    logits = apply(pairs.ids, target.ids, pairs.positions, target.positions)
    return cross_entropy(logits, target.labels, label_smoothing=label_smoothing, z_loss=z_loss), target.weights


def classes(
    model: nn.Module, params: Any, batch: Batch, dropout_key: Array | None = None
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """A classifier's objective: labels and weights [B] of texts, or [B T] of their tokens."""
    apply: Callable[..., Any] = partial(model.apply, {"params": params}, rngs=_rngs(dropout_key))
    return cross_entropy(apply(batch.ids, batch.positions, batch.segments), batch.labels), batch.weights


def _rngs(dropout_key: Array | None) -> dict[str, Array] | None:
    return None if dropout_key is None else {"dropout": dropout_key}

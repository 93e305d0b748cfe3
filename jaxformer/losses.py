"""Losses per token, and their weighted mean.

nll(t)      = logsumexp(logits_t) - logits_t[label_t]
smoothed(t) = (1 - e) nll(t) + e (logsumexp(logits_t) - mean_v logits_t[v])      (Szegedy et al. 2016, section 7)
z_loss(t)   = c logsumexp(logits_t)^2                                            (Chowdhery et al. 2022, section 5)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "*B V"], labels: Int[Array, "*B"], *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Float[Array, "*B"]:
    """Returns the float32 loss of each token in nats; leave out tokens by weight 0 in `weighted_mean`.

    A label outside of the vocabulary gives NaN (or nothing, where its weight is 0).

    Args:
      label_smoothing: share e of the target that is spread over all V classes, in [0, 1).
      z_loss: coefficient c that keeps the normaliser near 1.

    Raises:
      ValueError: a smoothing outside of [0, 1), or a negative z_loss.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be from 0 up to, but without, 1")
    if not z_loss >= 0:
        raise ValueError(f"z_loss={z_loss} must not be negative")
    logits = logits.astype(jnp.float32)
    V = logits.shape[-1]
    valid = (labels >= 0) & (labels < V)
    picked = jnp.take_along_axis(logits, jnp.where(valid, labels, 0)[..., None], axis=-1)[..., 0]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    loss = normaliser - jnp.where(valid, picked, jnp.nan)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (normaliser - logits.mean(axis=-1))
    if z_loss:
        loss = loss + z_loss * jnp.square(normaliser)
    return loss


def in_blocks(function: Callable[..., Array], block: int, *arrays: Array) -> Array:
    """Returns function(*arrays), computed for `block` columns at a time and again in the backward pass.

    So the logits of a whole text never exist, neither forward nor backward.

    Args:
      function: of columns [B C ...] of the arrays; its result [B C ...] depends on each column by itself.
      block: C; the last block is filled up with zeros, whose results are dropped.
      arrays: [B T ...] each.

    Raises:
      ValueError: a block below 1.
    """
    if block < 1:
        raise ValueError(f"block={block} must be at least 1 column")
    B, T = arrays[0].shape[:2]
    size = min(block, T)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, -T % size), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(B, -1, size, *x.shape[2:]), 1, 0)

    out = jax.lax.map(jax.checkpoint(lambda columns: function(*columns)), tuple(map(split, arrays)))
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, *out.shape[3:])[:, :T]


def weighted_sum(values: Float[Array, "*B"], weights: Float[Array, "*B"]) -> tuple[Array, Array]:
    """Returns (sum of weights * values, sum of weights); values of weight 0 do not enter, whatever they are."""
    return jnp.where(weights > 0, weights * values, 0).sum(), weights.sum()


def weighted_mean(values: Float[Array, "*B"], weights: Float[Array, "*B"]) -> Float[Array, ""]:
    """Returns sum(weights * values) / sum(weights), or 0 where no value has weight."""
    total, weight = weighted_sum(values, weights)
    return total / jnp.where(weight > 0, weight, 1)

"""Scaled dot-product attention with the whole pattern in memory: the reference implementation.

    z = softmax(scale * q k^T + bias) v                                   (Vaswani et al. 2017, equation 1)

It honours every argument and is the only implementation in which the pattern exists, so that it can be read or edited.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from jaxformer.attention.dropout import Dropout, keep_weights
from jaxformer.masks import Mask


def masked_softmax(scores: Float[Array, "*B S"], allowed: Bool[Array, "*#B S"]) -> Float[Array, "*B S"]:
    """Returns the softmax over the allowed keys; a row that allows none is exactly 0, with finite gradients."""
    scores = jnp.where(allowed, scores, -jnp.inf)
    high = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    # A row of -inf alone would be -inf - -inf, whose NaN reaches every gradient.
    weights = jnp.exp(scores - jnp.where(high == -jnp.inf, 0, high))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def softcapped(scores: Array, softcap: float | None) -> Array:
    """Bounds scores to (-softcap, softcap) smoothly; None leaves them (Gemma 2, 2024, section 2)."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def einsum_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    bias: Float[Array, "#B N T S"] | Callable[..., Array] | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    pattern_fn: Callable[[Array], Array] | None = None,
    dropout: Dropout | None = None,
) -> Float[Array, "B T N H"]:
    """Attends with [B N T S] scores in float32; see `attention` for the arguments."""
    K = k.shape[2]
    q = rearrange(q, "B T (K G) H -> B T K G H", K=K)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * scale
    scores = rearrange(softcapped(scores, softcap), "B K G T S -> B (K G) T S")
    if callable(bias):
        bias = bias(mask.q_positions, mask.kv_positions)
    if bias is not None:
        scores = scores + bias
    pattern = masked_softmax(scores, mask.dense())
    if pattern_fn is not None:
        pattern = pattern_fn(pattern)
    if dropout is not None:
        B, N, T, S = pattern.shape
        pattern = pattern * keep_weights(dropout.rate, dropout.seeds(), B, N, jnp.arange(T), jnp.arange(S))
    pattern = rearrange(pattern.astype(v.dtype), "B (K G) T S -> B K G T S", K=K)
    z = jnp.einsum("BKGTS,BSKH->BTKGH", pattern, v)
    return rearrange(z, "B T K G H -> B T (K G) H")

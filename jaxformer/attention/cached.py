"""Attention over a cache, reading only the slots in use, with an online softmax over blocks of them.

A token's cost grows with the text so far and not with the capacity of the cache, and the layers' keys and values are
read where they lie: no layer is copied out.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from jaxformer.attention.arguments import Bias, check_terms
from jaxformer.attention.einsum import softcapped
from jaxformer.attention.online import Online, empty, finish, update
from jaxformer.cache import LayerView
from jaxformer.masks import Mask

BLOCK = 256
"""Slots read at a time: large enough for a good product, small beside a long cache."""


def cached_attention(
    q: Float[Array, "B T N H"],
    view: LayerView,
    mask: Mask,
    bias: Bias = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attends to the slots in use of one layer of a cache, the new tokens among them.

    Args:
      mask: T queries against all S slots.

    Returns:
      z [B T N H]; a row without any allowed slot is 0. Not differentiable: the number of blocks depends on the length.

    Raises:
      ValueError: a mask or a bias of the tokens instead of the slots, or of other queries.
    """
    B, H = q.shape[0], q.shape[3]
    K, S = view.kv.k.shape[2:4]
    bias = check_terms(q, S, mask, bias, softcap)
    C = min(BLOCK, S)
    query = rearrange(q, "B T (K G) H -> B K G T H", K=K)

    def step(i: Array, online: Online) -> Online:
        start = jnp.minimum(i * C, S - C)
        k, v = (
            jax.lax.dynamic_slice(x, (view.layer, 0, 0, start, 0), (1, B, K, C, H))[0].astype(q.dtype)
            for x in (view.kv.k, view.kv.v)
        )
        scores = jnp.einsum("BKGTH,BKCH->BKGTC", query, k, preferred_element_type=jnp.float32) * scale
        scores = softcapped(scores, softcap)
        slots = _slots(mask, start, C)
        if bias is not None:
            if callable(bias):
                block = bias(mask.q_positions, slots.kv_positions)
            else:
                block = jax.lax.dynamic_slice_in_dim(bias, start, C, axis=3)
            scores = scores + rearrange(block, "B (K G) T C -> B K G T C", K=K)
        # The last block is moved back to end at S; its slots that an earlier block held must not count twice.
        fresh = start + jnp.arange(C) >= i * C
        seen = (slots.dense() & fresh)[:, :, None]
        return update(online, jnp.where(seen, scores, -jnp.inf), v)

    blocks = (view.length + C - 1) // C
    z, _ = finish(jax.lax.fori_loop(0, blocks, step, empty(query.shape[:-1], H)))
    return rearrange(z.astype(q.dtype), "B K G T H -> B T (K G) H")


def _slots(mask: Mask, start: Array, size: int) -> Mask:
    """Returns the mask of `size` slots: the whole one, made for every token, would cost what the capacity says."""
    positions = jax.lax.dynamic_slice_in_dim(mask.kv_positions, start, size, axis=1)
    segments = mask.kv_segments
    if segments is not None:
        segments = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
    return mask.with_keys(positions, segments)

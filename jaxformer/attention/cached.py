"""Attention over a cache, reading only the slots in use, with an online softmax over blocks of them.

A token's cost grows with the text so far and not with the capacity of the cache, and the layers' keys and values are
read where they lie: no layer is copied out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from jaxformer.attention.arguments import Bias, check_terms
from jaxformer.attention.einsum import einsum_attention, softcapped
from jaxformer.attention.online import Online, empty, finish, update
from jaxformer.cache import LayerView
from jaxformer.masks import Mask
from jaxformer.storage import KV

Static = tuple[Any, float, float | None]
"""The tree of a mask, scale and softcap."""
BLOCK = 512
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
    """Attends to the slots in use of one layer of a cache, and to the view's fresh tokens after them.

    Args:
      mask: T queries against all S slots and the fresh tokens.

    Returns:
      z [B T N H]; a row without any allowed slot is 0. The gradient is taken through scores against all slots at once,
      because the number of blocks depends on the length.

    Raises:
      ValueError: a mask or a bias of the tokens instead of the slots, or of other queries.
    """
    keys = view.kv.k.shape[3] + (0 if view.fresh is None else view.fresh.k.shape[1])
    bias = check_terms(q, keys, mask, bias, softcap)
    # A mask's tree depends on which of its leaves are one array, which the rules of derivatives do not preserve.
    leaves, tree = jax.tree.flatten(mask)
    return _attend((tree, scale, softcap), q, view, leaves, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q: Array, view: LayerView, mask_leaves: list[Array], bias: Any) -> Array:
    tree, scale, softcap = static
    mask, H, T = jax.tree.unflatten(tree, mask_leaves), q.shape[3], q.shape[1]
    K, S = view.kv.k.shape[2:4]
    query = rearrange(q, "B T (K G) H -> B K G T H", K=K)

    def take(online: Online, kv: KV, start: Array, new: Array) -> Online:
        """Takes keys [B K C H], from number `start` of the mask's on; those that are not `new` were taken before."""
        size = kv.k.shape[2]
        # Keys come first, because XLA's CPU backend turns the second factor around, and queries are the smaller one.
        scores = jnp.einsum("BKCH,BKGTH->BKCGT", kv.k, query, preferred_element_type=jnp.float32) * scale
        scores = softcapped(rearrange(scores, "B K C G T -> B K G T C"), softcap)
        some = _some_keys(mask, start, size)
        if bias is not None:
            if callable(bias):
                block = bias(mask.q_positions, some.kv_positions)
            else:
                block = jax.lax.dynamic_slice_in_dim(bias, start, size, axis=3)
            scores = scores + rearrange(block, "B (K G) T C -> B K G T C", K=K)
        return update(online, jnp.where((some.dense() & new)[:, :, None], scores, -jnp.inf), kv.v)

    online = _over(view.length, S, partial(_slots, view, q.dtype), take, empty(query.shape[:-1], H))
    if view.fresh is not None:
        tokens = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), view.fresh).decoded(q.dtype)

        def some_tokens(start: Array, size: int) -> KV:
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2), tokens)

        online = _over(T, T, some_tokens, lambda o, kv, start, new: take(o, kv, S + start, new), online)
    return rearrange(finish(online)[0].astype(q.dtype), "B K G T H -> B T (K G) H")


def _over(
    used: Array | int, total: int, read: Callable[..., KV], take: Callable[..., Online], online: Online
) -> Online:
    """Takes the first `used` of `total` keys, block by block."""
    size = min(BLOCK, total)

    def step(i: Array, online: Online) -> Online:
        # The last block is moved back to end where the keys end; those that an earlier block held must not count twice.
        start = jnp.minimum(i * size, total - size)
        return take(online, read(start, size), start, start + jnp.arange(size) >= i * size)

    return jax.lax.fori_loop(0, (used + size - 1) // size, step, online)


def _slots(view: LayerView, dtype: Any, start: Array | int, size: int) -> KV:
    """Returns keys and values [B K C H] of `size` slots."""

    def read(leaf: Array) -> Array:
        _, B, K, _, *width = leaf.shape
        at = (view.layer, 0, 0, start, *[0] * len(width))
        return jax.lax.dynamic_slice(leaf, at, (1, B, K, size, *width))[0]

    return jax.tree.map(read, view.kv).decoded(dtype)


def _some_keys(mask: Mask, start: Array, size: int) -> Mask:
    """Returns the mask of `size` keys: the whole one, made for every token, would cost what the capacity says."""
    positions = jax.lax.dynamic_slice_in_dim(mask.kv_positions, start, size, axis=1)
    segments = mask.kv_segments
    if segments is not None:
        segments = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
    return mask.with_keys(positions, segments)


def _attend_forward(static: Static, *args: Any) -> tuple[Array, tuple[Any, ...]]:
    return _attend(static, *args), args


def _attend_backward(static: Static, args: tuple[Any, ...], dz: Array) -> tuple[Any, ...]:
    return jax.vjp(partial(_at_once, static), *args)[1](dz)


def _at_once(static: Static, q: Array, view: LayerView, mask_leaves: list[Array], bias: Any) -> Array:
    """Attends to all slots at once: the same numbers, with a gradient."""
    tree, scale, softcap = static
    kv = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), _slots(view, q.dtype, 0, view.kv.k.shape[3]))
    if view.fresh is not None:
        kv = jax.tree.map(lambda old, new: jnp.concatenate([old, new.astype(q.dtype)], axis=1), kv, view.fresh)
    mask = jax.tree.unflatten(tree, mask_leaves)
    return einsum_attention(q, kv.k, kv.v, mask, bias, scale=scale, softcap=softcap)


_attend.defvjp(_attend_forward, _attend_backward)

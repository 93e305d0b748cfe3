"""Exact attention in memory linear in T: blocks of keys with an online softmax, and a backward pass that recomputes.

    p_ts = e^(a_ts - lse_t),   da_ts = p_ts (dz_t . v_s - dz_t . z_t),   dq_t = scale sum_s da_ts k_s,   dk_s alike

(Rabe and Staats 2021; Dao et al. 2022, "FlashAttention", algorithms 1 and 4). Between the passes only z and the
log-normaliser lse are kept. Blocks in which the mask allows nothing are found from the positions and not touched, so
that a sliding window costs T * window.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float

from jaxformer.attention.bias import PositionBias
from jaxformer.attention.dropout import Dropout, keep_weights
from jaxformer.attention.einsum import softcapped
from jaxformer.attention.grid import Grid, make_grid, padded, worklist
from jaxformer.attention.online import empty, finish, update
from jaxformer.masks import Mask

QUERIES, KEYS = 256, 512
"""Tokens in a block."""


class Static(NamedTuple):
    """What the program is compiled for."""

    scale: float
    softcap: float | None
    rate: float


class Terms(NamedTuple):
    """What comes to the products q . k of a block: the mask as a `Grid`, the bias and the seeds of dropout."""

    grid: Any
    bias: Any
    seeds: Array | None


def chunked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    bias: Any = None,
    *,
    scale: float,
    softcap: float | None = None,
    pattern_fn: Callable[[Array], Array] | None = None,
    dropout: Dropout | None = None,
) -> Float[Array, "B T N H"]:
    """Attends block by block, with gradients to q, k, v and the bias; see `attention` for the arguments.

    Raises:
      ValueError: a pattern_fn; the pattern is never held here.
    """
    if pattern_fn is not None:
        raise ValueError("'chunked' never holds the attention pattern; read or edit it with implementation='einsum'")
    sizes = min(QUERIES, q.shape[1]), min(KEYS, k.shape[1])
    return attend_blocks(q, k, v, mask, bias, sizes, scale=scale, softcap=softcap, dropout=dropout)


def attend_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    bias: Any,
    sizes: tuple[int, int],
    *,
    scale: float,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    layout: np.ndarray | None = None,
) -> Float[Array, "B T N H"]:
    """Attends over blocks of sizes (t, s); `layout` [T/t S/s] hides whole blocks besides what the mask hides."""
    T, (S, K), (t, s) = q.shape[1], k.shape[1:3], sizes
    if bias is not None and not callable(bias):
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -T % t), (0, -S % s)))
    terms = Terms(make_grid(mask, t, s, layout), bias, None if dropout is None else dropout.seeds())
    blocks = rearrange(padded(q, t), "B (I t) (K G) H -> I B K G t H", t=t, K=K)
    keys, values = (rearrange(padded(x, s), "B (J s) K H -> J B K s H", s=s) for x in (k, v))
    z = _attend(Static(scale, softcap, 0.0 if dropout is None else dropout.rate), blocks, keys, values, terms)
    return rearrange(z, "I B K G t H -> B (I t) (K G) H")[:, :T]


def _scores(static: Static, q: Array, k: Array) -> Float[Array, "B K G t s"]:
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32) * static.scale
    return softcapped(scores, static.softcap)


def _masked(capped: Float[Array, "B K G t s"], terms: Terms, i: Array, j: Array) -> Float[Array, "B K G t s"]:
    """Adds the block's bias to its scores and hides what the mask forbids with -inf."""
    if terms.bias is not None:
        block = _bias_block(terms.bias, terms.grid, i, j)
        capped = capped + rearrange(block, "b (K G) t s -> b K G t s", K=capped.shape[1])
    return jnp.where(terms.grid.allowed(i, j), capped, -jnp.inf)


def _bias_block(bias: Any, grid: Grid, i: Array, j: Array) -> Float[Array, "b N t s"]:
    if callable(bias):
        return bias(grid.q_positions[i], grid.kv_positions[j])
    t, s = grid.q_positions.shape[2], grid.kv_positions.shape[2]
    return jax.lax.dynamic_slice(bias, (0, 0, i * t, j * s), (*bias.shape[:2], t, s))


def _keep(static: Static, seeds: Array | None, shape: tuple[int, ...], i: Array, j: Array) -> Array | None:
    """Returns dropout's factors on the pattern of a block of shape [B K G t s]."""
    if seeds is None:
        return None
    B, K, G, t, s = shape
    keep = keep_weights(static.rate, seeds, B, K * G, i * t + jnp.arange(t), j * s + jnp.arange(s))
    return keep.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q: Array, k: Array, v: Array, terms: Terms) -> Array:
    return _forward(static, q, k, v, terms)[0]


def _forward(static: Static, q: Array, k: Array, v: Array, terms: Terms) -> tuple[Array, tuple[Any, ...]]:
    count, blocks = worklist(terms.grid.active())

    def row(i: Array) -> tuple[Array, Array]:
        def step(n: Array, online: Any) -> Any:
            j = blocks[i, n]
            scores = _masked(_scores(static, q[i], k[j]), terms, i, j)
            return update(online, scores, v[j], _keep(static, terms.seeds, scores.shape, i, j))

        return finish(jax.lax.fori_loop(0, count[i], step, empty(q.shape[1:-1], q.shape[-1])))

    z, lse = jax.lax.map(row, jnp.arange(q.shape[0]))
    z = z.astype(q.dtype)
    return z, (q, k, v, terms, z, lse)


def _backward(static: Static, residuals: tuple[Any, ...], dz: Array) -> tuple[Any, ...]:
    q, k, v, terms, z, lse = residuals
    count, blocks = worklist(terms.grid.active().T)
    delta = jnp.einsum("IBKGTH,IBKGTH->IBKGT", dz, z, preferred_element_type=jnp.float32)

    def column(carry: tuple[Array, Any], j: Array) -> tuple[tuple[Array, Any], tuple[Array, Array]]:
        def step(n: Array, carry: tuple[Array, Any, Array, Array]) -> tuple[Array, Any, Array, Array]:
            dq, dbias, dk, dv = carry
            i = blocks[j, n]
            capped = _scores(static, q[i], k[j])
            p = jnp.exp(_masked(capped, terms, i, j) - lse[i][..., None])
            dp = _product("BKGTH,BKSH->BKGTS", dz[i], v[j])
            keep = _keep(static, terms.seeds, p.shape, i, j)
            dropped, dp = (p, dp) if keep is None else (p * keep, dp * keep)
            da = p * (dp - delta[i][..., None])
            dbias = _add_bias_gradient(dbias, terms, da, i, j)
            if static.softcap is not None:
                da = da * (1 - jnp.square(capped / static.softcap))
            da = (da * static.scale).astype(q.dtype)
            dq = dq.at[i].add(_product("BKGTS,BKSH->BKGTH", da, k[j]))
            dk = dk + _product("BKGTS,BKGTH->BKSH", da, q[i])
            return dq, dbias, dk, dv + _product("BKGTS,BKGTH->BKSH", dropped.astype(q.dtype), dz[i])

        zeros = jnp.zeros(k.shape[1:], jnp.float32)
        dq, dbias, dk, dv = jax.lax.fori_loop(0, count[j], step, (*carry, zeros, zeros))
        return (dq, dbias), (dk.astype(k.dtype), dv.astype(v.dtype))

    start = (jnp.zeros(q.shape, jnp.float32), jax.tree.map(jnp.zeros_like, terms.bias))
    (dq, dbias), (dk, dv) = jax.lax.scan(column, start, jnp.arange(k.shape[0]))
    return dq.astype(q.dtype), dk, dv, Terms(None, dbias, None)


def _product(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _add_bias_gradient(total: Any, terms: Terms, da: Float[Array, "B K G t s"], i: Array, j: Array) -> Any:
    if terms.bias is None:
        return None
    da = rearrange(da, "B K G t s -> B (K G) t s")
    if callable(terms.bias):
        return jax.tree.map(jnp.add, total, _pulled_back(terms.bias, terms.grid, da, i, j))
    if total.shape[0] == 1:
        da = da.sum(axis=0, keepdims=True)
    at = (0, 0, i * da.shape[2], j * da.shape[3])
    return jax.lax.dynamic_update_slice(total, jax.lax.dynamic_slice(total, at, da.shape) + da, at)


def _pulled_back(bias: Any, grid: Grid, da: Float[Array, "B N t s"], i: Array, j: Array) -> Any:
    """Returns the gradient of a function of positions from that of its block, which may be one for all rows."""
    block, pull = jax.vjp(lambda bias: _bias_block(bias, grid, i, j), bias)
    if block.shape[0] != da.shape[0]:
        da = da.sum(axis=0, keepdims=True)
    if isinstance(bias, PositionBias):
        return bias.pullback(grid.q_positions[i], grid.kv_positions[j], da)
    return pull(da)[0]


_attend.defvjp(_forward, _backward)

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
from einops import rearrange
from jaxtyping import Array, Float, Int

from jaxformer.attention.einsum import softcapped
from jaxformer.attention.online import empty, finish, update
from jaxformer.masks import Mask

QUERIES, KEYS = 256, 512
"""Tokens in a block."""


class Static(NamedTuple):
    """What the program is compiled for."""

    scale: float
    softcap: float | None
    is_causal: bool
    window: int | None


class Grid(NamedTuple):
    """Positions and segments cut into I blocks of queries and J blocks of keys: [I b t] and [J b s], b = B or 1."""

    q_positions: Array
    kv_positions: Array
    q_segments: Array | None
    kv_segments: Array | None

    def mask(self, static: Static, i: Array, j: Array) -> Mask:
        """Returns the mask of query block i against key block j."""
        q_segments = None if self.q_segments is None else self.q_segments[i]
        kv_segments = None if self.kv_segments is None else self.kv_segments[j]
        return Mask(self.q_positions[i], self.kv_positions[j], q_segments, kv_segments, static.is_causal, static.window)

    def active(self, static: Static) -> Array:
        """Returns [I J]: False where no pair of the block can be allowed, judged by the extremes of either side."""
        far = jnp.iinfo(jnp.int32).max
        q_low, q_high = (f(self.q_positions, axis=2)[:, None] for f in (jnp.min, jnp.max))
        valid = self.kv_positions >= 0
        kv_low = jnp.where(valid, self.kv_positions, far).min(axis=2)[None]
        kv_high = self.kv_positions.max(axis=2)[None]
        active = jnp.broadcast_to(kv_high >= 0, jnp.broadcast_shapes(kv_high.shape, q_high.shape))
        if static.is_causal:
            active &= kv_low <= q_high
        if static.window is not None:
            active &= q_low - kv_high < static.window
            if not static.is_causal:
                active &= kv_low - q_high < static.window
        if self.q_segments is not None and self.kv_segments is not None:
            active &= self.q_segments.max(axis=2)[:, None] >= self.kv_segments.min(axis=2)[None]
            active &= self.q_segments.min(axis=2)[:, None] <= self.kv_segments.max(axis=2)[None]
        return active.any(axis=2)


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
) -> Float[Array, "B T N H"]:
    """Attends block by block, with gradients to q, k, v and the bias; see `attention` for the arguments.

    Raises:
      ValueError: a pattern_fn; the pattern is never held here.
    """
    if pattern_fn is not None:
        raise ValueError("'chunked' never holds the attention pattern; read or edit it with implementation='einsum'")
    T, (S, K) = q.shape[1], k.shape[1:3]
    t, s = min(QUERIES, T), min(KEYS, S)
    static, grid = Static(scale, softcap, mask.is_causal, mask.window), make_grid(mask, t, s)
    if bias is not None and not callable(bias):
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -T % t), (0, -S % s)))
    blocks = rearrange(_padded(q, t), "B (I t) (K G) H -> I B K G t H", t=t, K=K)
    keys, values = (rearrange(_padded(x, s), "B (J s) K H -> J B K s H", s=s) for x in (k, v))
    z = _attend(static, blocks, keys, values, bias, grid)
    return rearrange(z, "I B K G t H -> B (I t) (K G) H")[:, :T]


def make_grid(mask: Mask, t: int, s: int) -> Grid:
    """Cuts a mask into blocks of t queries and s keys; padding repeats the last query and adds empty keys."""
    return Grid(
        _rows(mask.q_positions, t, mode="edge"),
        _rows(mask.kv_positions, s, constant_values=-1),
        None if mask.q_segments is None else _rows(mask.q_segments, t, mode="edge"),
        None if mask.kv_segments is None else _rows(mask.kv_segments, s, mode="edge"),
    )


def _padded(x: Array, size: int, **how: Any) -> Array:
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), **how)


def _rows(x: Int[Array, "b T"], size: int, **how: Any) -> Int[Array, "I b t"]:
    return rearrange(_padded(x, size, **how), "b (I t) -> I b t", t=size)


def _span(active: Array) -> tuple[Array, Array]:
    """Returns the first and one past the last True of each row; an empty row gives an empty span."""
    size = active.shape[1]
    last = size - active[:, ::-1].argmax(axis=1)
    return active.argmax(axis=1), jnp.where(active.any(axis=1), last, 0)


def _scores(static: Static, q: Array, k: Array) -> Float[Array, "B K G t s"]:
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32) * static.scale
    return softcapped(scores, static.softcap)


def _masked(static: Static, capped: Array, bias: Any, grid: Grid, i: Array, j: Array) -> Float[Array, "B K G t s"]:
    """Adds the block's bias to its scores and hides what the mask forbids with -inf."""
    if bias is not None:
        block = _bias_block(bias, grid, i, j)
        capped = capped + rearrange(block, "b (K G) t s -> b K G t s", K=capped.shape[1])
    return jnp.where(grid.mask(static, i, j).dense()[:, :, None], capped, -jnp.inf)


def _bias_block(bias: Any, grid: Grid, i: Array, j: Array) -> Float[Array, "b N t s"]:
    if callable(bias):
        return bias(grid.q_positions[i], grid.kv_positions[j])
    t, s = grid.q_positions.shape[2], grid.kv_positions.shape[2]
    return jax.lax.dynamic_slice(bias, (0, 0, i * t, j * s), (*bias.shape[:2], t, s))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q: Array, k: Array, v: Array, bias: Any, grid: Grid) -> Array:
    return _forward(static, q, k, v, bias, grid)[0]


def _forward(static: Static, q: Array, k: Array, v: Array, bias: Any, grid: Grid) -> tuple[Array, tuple[Any, ...]]:
    first, end = _span(grid.active(static))

    def row(i: Array) -> tuple[Array, Array]:
        def step(j: Array, online: Any) -> Any:
            return update(online, _masked(static, _scores(static, q[i], k[j]), bias, grid, i, j), v[j])

        return finish(jax.lax.fori_loop(first[i], end[i], step, empty(q.shape[1:-1], q.shape[-1])))

    z, lse = jax.lax.map(row, jnp.arange(q.shape[0]))
    z = z.astype(q.dtype)
    return z, (q, k, v, bias, grid, z, lse)


def _backward(static: Static, residuals: tuple[Any, ...], dz: Array) -> tuple[Any, ...]:
    q, k, v, bias, grid, z, lse = residuals
    first, end = _span(grid.active(static).T)
    delta = jnp.einsum("IBKGTH,IBKGTH->IBKGT", dz, z, preferred_element_type=jnp.float32)

    def column(carry: tuple[Array, Any], j: Array) -> tuple[tuple[Array, Any], tuple[Array, Array]]:
        def step(i: Array, carry: tuple[Array, Any, Array, Array]) -> tuple[Array, Any, Array, Array]:
            dq, dbias, dk, dv = carry
            capped = _scores(static, q[i], k[j])
            p = jnp.exp(_masked(static, capped, bias, grid, i, j) - lse[i][..., None])
            da = p * (_product("BKGTH,BKSH->BKGTS", dz[i], v[j]) - delta[i][..., None])
            dbias = _add_bias_gradient(dbias, bias, da, grid, i, j)
            if static.softcap is not None:
                da = da * (1 - jnp.square(capped / static.softcap))
            da = (da * static.scale).astype(q.dtype)
            dq = dq.at[i].add(_product("BKGTS,BKSH->BKGTH", da, k[j]))
            dk = dk + _product("BKGTS,BKGTH->BKSH", da, q[i])
            return dq, dbias, dk, dv + _product("BKGTS,BKGTH->BKSH", p.astype(q.dtype), dz[i])

        zeros = jnp.zeros(k.shape[1:], jnp.float32)
        dq, dbias, dk, dv = jax.lax.fori_loop(first[j], end[j], step, (*carry, zeros, zeros))
        return (dq, dbias), (dk.astype(k.dtype), dv.astype(v.dtype))

    start = (jnp.zeros(q.shape, jnp.float32), jax.tree.map(jnp.zeros_like, bias))
    (dq, dbias), (dk, dv) = jax.lax.scan(column, start, jnp.arange(k.shape[0]))
    return dq.astype(q.dtype), dk, dv, dbias, None


def _product(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _add_bias_gradient(total: Any, bias: Any, da: Float[Array, "B K G t s"], grid: Grid, i: Array, j: Array) -> Any:
    if bias is None:
        return None
    da = rearrange(da, "B K G t s -> B (K G) t s")
    if callable(bias):
        block, pull = jax.vjp(lambda bias: _bias_block(bias, grid, i, j), bias)
        (gradient,) = pull(da if block.shape[0] == da.shape[0] else da.sum(axis=0, keepdims=True))
        return jax.tree.map(jnp.add, total, gradient)
    if total.shape[0] == 1:
        da = da.sum(axis=0, keepdims=True)
    at = (0, 0, i * da.shape[2], j * da.shape[3])
    return jax.lax.dynamic_update_slice(total, jax.lax.dynamic_slice(total, at, da.shape) + da, at)


_attend.defvjp(_forward, _backward)

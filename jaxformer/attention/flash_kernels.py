"""The kernels of fused attention: one block of queries or keys a program, the scores of a block never in memory.

    forward   z_t = sum_s p_ts v_s / l_t,   lse_t = log sum_s e^(a_ts)                        over s, online
    queries   dq_t = scale sum_s da_ts k_s,   da_ts = p_ts (dz_t . v_s - delta_t)             over s
    keys      dk_s = scale sum_t da_ts q_t,   dv_s = sum_t p_ts dz_t                          over t and heads

with p_ts = e^(a_ts - lse_t) made again from the saved lse, and delta_t = dz_t . z_t (Dao 2023, "FlashAttention-2",
algorithms 1 and 2). The bodies are the same for Triton (GPU), Mosaic (TPU) and the interpreter (CPU), and so keep to
what all of them can do: products of two matrices, rows [1 n] and columns [n 1], elementwise operations, sums.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxformer.attention.einsum import softcapped

Ref = Any
"""A piece of an operand in the program's reach: `ref[...]` reads it."""


class Static(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
      leaves: structure of a `PositionBias`, and the shape of one head of each leaf; None: an array as bias, or none.
    """

    scale: float
    softcap: float | None
    leaves: tuple[Any, tuple[tuple[int, ...], ...]] | None
    precision: jax.lax.Precision
    platform: str


class Queries(NamedTuple):
    """The queries' side of the mask: rows [1 t], or refs to them. Positions are there for a `PositionBias` only."""

    low: Any
    high: Any
    segments: Any
    positions: Any


class Keys(NamedTuple):
    """The keys' side of the mask: rows [1 s], or refs to them."""

    positions: Any
    segments: Any


class Span(NamedTuple):
    """First and one-past-last block of the other side in which row b of the batch sees anything: [B blocks]."""

    first: Any
    stop: Any

    def bounds(self, block: Array) -> tuple[Array, Array]:
        """Returns the bounds of the loop of this program, whose first grid axis is the batch."""
        b = pl.program_id(0)
        return self.first[b, block], self.stop[b, block]


def forward_kernel(
    static: Static,
    span: Span,
    queries: Queries,
    keys: Keys,
    bias: tuple[Ref, ...],
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    z_ref: Ref,
    lse_ref: Ref,
) -> None:
    """Attends from one block of queries of one head: q [t H], k and v [J s H], z [t H], lse [1 t]."""
    q, rows = q_ref[...], _read(queries)
    leaves = _read(bias) if static.leaves else ()

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, z = carry
        v, columns = v_ref[j], _read(keys, j)
        tile = _bias_along_keys(static, bias, leaves, rows, columns, j)
        _, scores = _scores(static, q, k_ref[j], _seen(_turn(rows), columns), tile)
        new = jnp.maximum(most, scores.max(axis=1, keepdims=True))
        # Rows that have seen nothing yet keep -inf; subtracting 0 instead keeps e^(-inf) = 0 free of NaN.
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        weights, decay = jnp.exp(scores - shift), jnp.exp(most - shift)
        total = decay * total + weights.sum(axis=1, keepdims=True)
        return new, total, decay * z + _product(static, weights.astype(v.dtype), v)

    column = jnp.zeros((q.shape[0], 1), jnp.float32)
    first, stop = span.bounds(pl.program_id(3))
    start = (column - jnp.inf, column, jnp.zeros(q.shape, jnp.float32))
    most, total, z = jax.lax.fori_loop(first, stop, step, start)
    seen = total != 0
    total = jnp.where(seen, total, 1.0)
    z_ref[...] = (z / total).astype(z_ref.dtype)
    lse_ref[...] = (jnp.where(seen, most, 0.0) + jnp.log(total)).reshape(lse_ref.shape)


def queries_kernel(
    static: Static,
    span: Span,
    queries: Queries,
    keys: Keys,
    bias: tuple[Ref, ...],
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dz_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    dq_ref: Ref,
    *dbias: Ref,
) -> None:
    """Gives one block of queries of one head its gradient, and the bias its: dbias [t S], or [1 R] of each leaf."""
    q, dz, rows = q_ref[...], dz_ref[...], _read(queries)
    lse, delta = _turn((lse_ref[...], delta_ref[...]))
    leaves = _read(bias) if static.leaves else ()
    first, stop = span.bounds(pl.program_id(3))

    def step(j: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
        dq, gradients = carry
        k, columns = k_ref[j], _read(keys, j)
        tile = _bias_along_keys(static, bias, leaves, rows, columns, j)
        capped, scores = _scores(static, q, k, _seen(_turn(rows), columns), tile)
        da = jnp.exp(scores - lse) * (_product(static, dz, v_ref[j], transposed=True) - delta)
        if static.leaves:
            _, pull = jax.vjp(lambda *leaves: _of_positions(static, leaves, rows, columns), *leaves)
            gradients = tuple(map(jnp.add, gradients, pull(da)))
        elif dbias:
            _write(dbias[0], j, da)
        return dq + _product(static, _through_cap(static, da, capped).astype(k.dtype), k), gradients

    if dbias and not static.leaves:  # What no step writes is 0, not what happened to be in that memory.
        blank = jnp.zeros((q.shape[0], k_ref.shape[1]), jnp.float32)
        for start, end in ((0, first), (stop, k_ref.shape[0])):
            jax.lax.fori_loop(start, end, lambda j, _: _write(dbias[0], j, blank), None)
    zeros = (jnp.zeros(q.shape, jnp.float32), tuple(map(jnp.zeros_like, leaves)))
    dq, gradients = jax.lax.fori_loop(first, stop, step, zeros)
    dq_ref[...] = dq.astype(dq_ref.dtype)
    for ref, gradient in zip(dbias, gradients, strict=False):
        ref[...] = gradient


def keys_kernel(
    static: Static,
    span: Span,
    queries: Queries,
    keys: Keys,
    bias: tuple[Ref, ...],
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dz_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    dk_ref: Ref,
    dv_ref: Ref,
) -> None:
    """Gives one block of keys and values its gradients: k, v [s H]; q, dz [G I t H]; lse, delta [G I 1 t].

    Scores stand here as [s t]: the products of both sums then need no transpose, and lse and delta are rows.
    """
    k, v, columns = k_ref[...], v_ref[...], _read(keys)
    first, stop = span.bounds(pl.program_id(2))

    def head(g: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        leaves = _read(bias, g) if static.leaves else ()

        def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            q, dz, rows = q_ref[g, i], dz_ref[g, i], _read(queries, i)
            tile = _bias_along_queries(static, bias, leaves, rows, columns, (g, i))
            capped, scores = _scores(static, k, q, _seen(rows, _turn(columns)), tile)
            p = jnp.exp(scores - lse_ref[g, i])
            da = p * (_product(static, v, dz, transposed=True) - delta_ref[g, i])
            dk = dk + _product(static, _through_cap(static, da, capped).astype(q.dtype), q)
            return dk, dv + _product(static, p.astype(dz.dtype), dz)

        return jax.lax.fori_loop(first, stop, step, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[0], head, (zeros, zeros))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def _read(refs: Any, *at: Array) -> Any:
    return jax.tree.map(lambda ref: ref[at or ...], refs)


def _turn(rows: Any) -> Any:
    """Makes columns [n 1] of rows [1 n]."""
    return jax.tree.map(lambda row: row.reshape(row.shape[1], 1), rows)


def _seen(queries: Queries, keys: Keys) -> Array:
    """Returns who may attend to whom; one side is given as rows and the other as columns."""
    seen = (queries.low <= keys.positions) & (keys.positions <= queries.high)
    return seen if keys.segments is None else seen & (queries.segments == keys.segments)


def _scores(static: Static, x: Array, y: Array, seen: Array, bias: Array | None) -> tuple[Array, Array]:
    """Returns the scores of x's rows and y's, first as capped, then with the bias and -inf for what is hidden."""
    capped = softcapped(_product(static, x, y, transposed=True) * static.scale, static.softcap)
    return capped, jnp.where(seen, capped if bias is None else capped + bias, -jnp.inf)


def _through_cap(static: Static, da: Array, capped: Array) -> Array:
    """Returns the gradient of the products q . k from that of the scores."""
    if static.softcap is not None:
        da = da * (1 - jnp.square(capped / static.softcap))
    return da * static.scale


def _product(static: Static, x: Array, y: Array, transposed: bool = False) -> Array:
    """Multiplies x by y, or by y transposed, in their own type with sums in float32."""
    contracted = ((1,), (1 if transposed else 0,))
    return jax.lax.dot_general(
        x, y, (contracted, ((), ())), precision=static.precision, preferred_element_type=jnp.float32
    )


# The bias of one block ------------------------------------------------------------------------------------------------


def _bias_along_keys(
    static: Static, bias: tuple[Ref, ...], leaves: tuple[Array, ...], rows: Queries, columns: Keys, j: Array
) -> Array | None:
    """Returns the bias [t s] of key block j for the program's queries; an array's ref is [t S]."""
    if static.leaves:
        return _of_positions(static, leaves, rows, columns)
    s = columns.positions.shape[1]
    return bias[0][:, pl.ds(pl.multiple_of(j * s, s), s)].astype(jnp.float32) if bias else None


def _bias_along_queries(
    static: Static,
    bias: tuple[Ref, ...],
    leaves: tuple[Array, ...],
    rows: Queries,
    columns: Keys,
    at: tuple[Array, Array],
) -> Array | None:
    """Returns the bias [s t] of head and query block `at` for the program's keys; an array's ref is [G I t s]."""
    if static.leaves:
        return _of_positions(static, leaves, rows, columns).T
    return bias[0][at].astype(jnp.float32).T if bias else None


def _of_positions(static: Static, leaves: tuple[Array, ...], rows: Queries, columns: Keys) -> Array:
    """Calls the `PositionBias` that has one head, whose leaves are read as [1 R], on one block's positions: [t s]."""
    assert static.leaves is not None
    tree, shapes = static.leaves
    bias = tree.unflatten([leaf.reshape(1, *shape) for leaf, shape in zip(leaves, shapes, strict=True)])
    block = bias(rows.positions, columns.positions)
    return block.reshape(block.shape[2:])


def _write(ref: Ref, j: Array, tile: Array) -> None:
    s = tile.shape[1]
    ref[:, pl.ds(pl.multiple_of(j * s, s), s)] = tile

"""What every implementation of attention may rely on; refused here, before anything is traced, if it does not hold."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.checks import check_positive
from jaxformer.masks import Mask

Bias = Float[Array | np.ndarray, "#B N T S"] | Callable[..., Array] | None


def check_arrays(q: Array, k: Array, v: Array) -> None:
    """Refuses arrays that do not fit together.

    Raises:
      ValueError: shapes or types that differ, or types that are not floating.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; it must be [batch, tokens, heads, width]")
    (B, _, N, H), (Bk, _, K, Hk) = q.shape, k.shape
    if (Bk, Hk) != (B, H) or v.shape != k.shape:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} must agree in batch, keys, kv heads and width")
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} key/value heads; each must serve the same number")
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast them to one floating type")


def check_terms(
    q: Array, S: int, mask: Mask, bias: Bias, softcap: float | None
) -> Float[Array, "#B N T S"] | Callable[..., Array] | None:
    """Returns the bias in the form that implementations take: float32, or a pytree that makes blocks of it.

    Args:
      q: the queries [B T N H].
      S: number of keys, or of the slots of a cache.

    Raises:
      ValueError: a mask or a bias of other queries or keys, a bias that is neither a float array nor a pytree of them
        that can be called, or a softcap that is not positive.
    """
    B, T, N, _ = q.shape
    check_positive("softcap", softcap, optional=True)
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(mask) if leaf.ndim} - {1, B}
    if rows or (mask.q_positions.shape[1], mask.kv_positions.shape[1]) != (T, S):
        raise ValueError(
            f"the mask is of positions {mask.q_positions.shape} x {mask.kv_positions.shape}, but there are {B} rows of "
            f"{T} queries and {S} keys; over a cache, make it of the positions of all its slots"
        )
    if bias is None:
        return None
    if callable(bias):
        _check_leaves(bias)
        made = jax.eval_shape(bias, mask.q_positions, mask.kv_positions)
    else:
        made = bias
    shape, dtype = jnp.shape(made), jnp.result_type(made)
    if shape not in ((1, N, T, S), (B, N, T, S)):
        raise ValueError(f"bias has shape {shape}; it must be [1 or batch, query heads, T, S] = {(B, N, T, S)}")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"bias is {dtype}; it is added to the scores and must be floating (a mask hides, not a bias)")
    return bias if callable(bias) else jnp.asarray(bias, jnp.float32)


def _check_leaves(bias: Callable[..., Array]) -> None:
    """Refuses a function whose arrays JAX cannot see, or whose gradient does not exist."""
    for leaf in jax.tree.leaves(bias):
        if callable(leaf):
            raise ValueError(
                f"the bias {bias!r} is a plain function, so that gradients could not reach what it holds; write it as "
                "jax.tree_util.Partial(function, *arrays) or as a PositionBias"
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"the bias {type(bias).__name__} has a leaf of type {jnp.result_type(leaf)}; gradients flow to all "
                "leaves, so make it floating, or a static field"
            )

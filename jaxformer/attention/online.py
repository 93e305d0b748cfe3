"""The online softmax: attention over keys that arrive in blocks, in one pass and without the whole row of scores.

    m' = max(m, max_s a_s),   l' = e^(m-m') l + sum_s e^(a_s-m'),   z' = e^(m-m') z + sum_s e^(a_s-m') v_s

(Milakov and Gimelshein 2018, algorithm 3; Rabe and Staats 2021). The result is z / l.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Online(NamedTuple):
    """What is kept of the keys so far, in float32: the highest score m, the sum l and the weighted values z."""

    high: Array
    total: Array
    z: Array


def empty(shape: tuple[int, ...], width: int) -> Online:
    """Returns the state before any key, for rows [B K G T] of this shape and values of this width."""
    return Online(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, width)))


def update(
    online: Online,
    scores: Float[Array, "B K G T S"],
    v: Float[Array, "B K S H"],
    keep: Float[Array, "B K G T S"] | None = None,
) -> Online:
    """Takes one more block of keys; a score of -inf hides a key. `keep` holds dropout's factors on the pattern."""
    high = jnp.maximum(online.high, scores.max(axis=-1))
    # Rows that have seen nothing yet keep -inf; subtracting 0 instead keeps e^(-inf) = 0 free of NaN.
    shift = jnp.where(high == -jnp.inf, 0, high)
    weights, decay = jnp.exp(scores - shift[..., None]), jnp.exp(online.high - shift)
    kept = weights if keep is None else weights * keep
    new = jnp.einsum("BKGTS,BKSH->BKGTH", kept.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Online(high, decay * online.total + weights.sum(axis=-1), decay[..., None] * online.z + new)


def finish(online: Online) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K G T"]]:
    """Returns z and log sum_s e^(a_s); both are 0 for a row that saw no key."""
    seen = online.total != 0
    total = jnp.where(seen, online.total, 1)
    return online.z / total[..., None], jnp.where(seen, online.high, 0) + jnp.log(total)

"""Dropout of the attention pattern, decided by the place in it: every implementation drops the same weights.

    pattern'[b, n, t, s] = pattern[b, n, t, s] / (1 - rate)   where hash(key, b, n, t, s) >= rate 2^32,   else 0

(Srivastava et al. 2014, section 4; Vaswani et al. 2017 apply it to the pattern too.) A hash of the indices needs no
array of random bits, so a block of the pattern can be dropped, and dropped again in the backward pass, on its own.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from jaxformer.checks import check_rate
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True)
class Dropout:
    """A rate in [0, 1) and the random key [] that decides which weights are dropped.

    Raises:
      ValueError: a rate out of range.
    """

    key: Leaf
    rate: float

    def __post_init__(self) -> None:
        check_rate("dropout's rate", self.rate)

    def seeds(self) -> UInt32[Array, "2"]:
        """Returns the two random words from which `keep_weights` decides."""
        return jax.random.bits(self.key, (2,))


def keep_weights(rate: float, seeds: UInt32[Array, "2"], B: int, N: int, t: Array, s: Array) -> Float[Array, "B N t s"]:
    """Returns the factors on the pattern of query indices t and key indices s: 0, or 1 / (1 - rate).

    Args:
      t, s: indices in the whole pattern (not positions), [t] and [s].
    """
    heads = _mix(jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N, 1, 1) + seeds[0])
    rows = _mix(heads ^ _mix(t.astype(jnp.uint32) + seeds[1])[:, None])
    bits = _mix(rows ^ _mix(s.astype(jnp.uint32) + seeds[0]))
    return jnp.where(bits >= np.uint32(rate * 2**32), 1 / (1 - rate), 0.0)


def _mix(x: Array) -> Array:
    """Spreads every bit of uint32 numbers over all bits (the finalizer of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

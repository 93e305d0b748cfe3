"""How keys and values lie in memory: as floating numbers, or as int8 with a scale for each token and head.

    int8: x ~ scale * n,   scale = max_h |x_h| / 127,   n = round(x / scale)          |x - scale n| <= scale / 2

Both are pytrees whose leaves begin with the same axes, so that a cache writes and reads them leaf by leaf.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KV:
    """Keys and values: [B S K H] for one layer's tokens, [L B K S H] inside a cache."""

    k: Leaf
    v: Leaf

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: DTypeLike) -> "KV":
        """Returns zeros of this shape, [... H]."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def encoded(self, new: "KV") -> "KV":
        """Returns new keys and values in the form that is stored."""
        return KV(new.k.astype(self.k.dtype), new.v.astype(self.v.dtype))

    def decoded(self, dtype: DTypeLike) -> "KV":
        """Returns keys and values as numbers to compute with."""
        return KV(self.k.astype(dtype), self.v.astype(dtype))


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "k_scale", "v_scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Int8KV:
    """Keys and values in int8, and a float32 scale of each token and head: the shape of k without its last axis.

    A number is off by at most half a scale, 1/254 of the largest of its head. What is not finite makes its scale NaN.
    """

    k: Leaf
    v: Leaf
    k_scale: Leaf
    v_scale: Leaf

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: DTypeLike) -> "Int8KV":
        """Returns zeros of this shape, [... H]; the type of what is stored does not depend on `dtype`."""
        numbers, scales = (jnp.zeros(shape, jnp.int8) for _ in "kv"), (jnp.zeros(shape[:-1]) for _ in "kv")
        return cls(*numbers, *scales)

    def encoded(self, new: KV) -> "Int8KV":
        """Returns new keys and values in the form that is stored."""
        (k, k_scale), (v, v_scale) = _quantised(new.k), _quantised(new.v)
        return Int8KV(k, v, k_scale, v_scale)

    def decoded(self, dtype: DTypeLike) -> KV:
        """Returns keys and values as numbers to compute with."""
        k, v = (
            (numbers * scale[..., None]).astype(dtype)
            for numbers, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return KV(k, v)


Storage = KV | Int8KV


def _quantised(x: Leaf) -> tuple[Leaf, Leaf]:
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(axis=-1) / 127
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    return jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None]).astype(jnp.int8), scale

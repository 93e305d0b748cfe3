"""Score biases from positions: distances through a slope of each head, or through a learned table.

ALiBi       bias[n, t, s] = -slope_n |q_t - kv_s|,  slope_n = 2^(-8 n / N)        (Press et al. 2022, section 3)
relative    bias[n, t, s] = table[n, bucket(q_t - kv_s)]                          (Raffel et al. 2020, section 2.1)
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.attention import PositionBias
from jaxformer.config import Config
from jaxformer.trees import Leaf


def alibi_slopes(heads: int) -> list[float]:
    """Returns the slope of each head, 2^(-8 n / heads) for n = 1 .. heads if their number is a power of two.

    Other numbers take the slopes of the power of two below, and then every other one of the next, as published models
    do: 6 heads have 1/4, 1/16, 1/64, 1/256, 1/2, 1/8.
    """
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * n / power) for n in range(1, 2 * (heads - power), 2)]


@partial(jax.tree_util.register_dataclass, data_fields=["slopes"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Alibi(PositionBias):
    """Lowers scores by slopes [N] times the distance; keys after the query too, where the mask shows them."""

    slopes: Leaf

    def __call__(self, q_positions: Int[Array, "#b t"], kv_positions: Int[Array, "#b s"]) -> Float[Array, "b N t s"]:
        distance = jnp.abs(q_positions[:, None, :, None] - kv_positions[:, None, None, :])
        return -self.slopes[:, None, None] * distance.astype(jnp.float32)


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["two_sided", "reach"])
@dataclasses.dataclass(frozen=True)
class Relative(PositionBias):
    """Looks up table [N R] by the bucket of the distance: one each for short ones, logarithmic up to `reach`.

    Attributes:
      two_sided: the upper half of the buckets is for keys after the query; otherwise those count as distance 0.
      reach: distances from here on share the last bucket.
    """

    table: Leaf
    two_sided: bool
    reach: int

    def __call__(self, q_positions: Int[Array, "#b t"], kv_positions: Int[Array, "#b s"]) -> Float[Array, "b N t s"]:
        # A chain of selects, of entries that are masked sums: kernels, which know neither gather nor slice, run it too.
        after, distance = self._distance(q_positions[:, None, :, None], kv_positions[:, None, None, :])
        side = self.table.shape[1] // (1 + self.two_sided)
        bias = self._chain(distance, 0, side)
        return jnp.where(after, self._chain(distance, side, side), bias) if self.two_sided else bias

    def pullback(
        self, q_positions: Int[Array, "#b t"], kv_positions: Int[Array, "#b s"], gradient: Float[Array, "b N t s"]
    ) -> "Relative":
        """Adds up the gradient of each bucket; several times faster on a CPU than the transposed selects."""
        after, distance = self._distance(q_positions[:, :, None], kv_positions[:, None, :])
        N, R = self.table.shape
        side = R // (1 + self.two_sided)
        bucket = sum((distance >= low).astype(jnp.int32) for low in bucket_starts(side, self.reach))
        # Without the barrier XLA counts the buckets again for every head.
        bucket = jax.lax.optimization_barrier(bucket + (side * after if self.two_sided else 0))
        rows = jnp.einsum("bNts->btsN", gradient).reshape(-1, N)
        return dataclasses.replace(self, table=jax.ops.segment_sum(rows, bucket.reshape(-1), R).T)

    def _distance(self, q: Array, kv: Array) -> tuple[Array, Array]:
        distance = q - kv
        return distance < 0, jnp.abs(distance) if self.two_sided else jnp.maximum(distance, 0)

    def _chain(self, distance: Array, first: int, side: int) -> Array:
        numbers = jax.lax.broadcasted_iota(jnp.int32, self.table.shape, 1)

        def entry(r: int) -> Array:
            return jnp.where(numbers == r, self.table, 0).sum(axis=1)[:, None, None]

        bias = jnp.broadcast_to(entry(first), (distance.shape[0], self.table.shape[0], *distance.shape[2:]))
        for r, low in enumerate(bucket_starts(side, self.reach), start=first + 1):
            bias = jnp.where(distance >= low, entry(r), bias)
        return bias


def bucket_starts(buckets: int, reach: int) -> list[int]:
    """Returns the least distance of bucket 1, 2, ...: the first half one by one, the others spaced logarithmically.

    Bucket h + i of 2 h begins where log(n / h) / log(reach / h) h reaches i; compared here in exact integers.

    Raises:
      ValueError: fewer than 2 buckets, or a reach within the half that counts one by one.
    """
    exact = buckets // 2
    if exact < 1 or reach <= exact:
        raise ValueError(
            f"{buckets} buckets a side, of which {exact} count distances one by one, cannot reach to {reach}; "
            "give at least 2 buckets a side, and a reach beyond the half of them"
        )
    coarse = buckets - exact
    starts, n = list(range(1, exact + 1)), exact
    for i in range(1, coarse):
        while n**coarse * exact**i < reach**i * exact**coarse:
            n += 1
        starts.append(n)
    return starts


class RelativeTable(nn.Module):
    """The learned table of a stack, [R N] (R buckets), which all of its layers share."""

    config: Config
    two_sided: bool

    @nn.compact
    def __call__(self) -> Relative:
        config = self.config
        shape = (config.relative_buckets, config.num_heads)
        table = self.param("embedding", nn.initializers.normal(config.d_model**-0.5), shape, config.param_dtype)
        return Relative(table.astype(jnp.float32).T, self.two_sided, config.relative_reach)


def _alibi(config: Config, causal: bool) -> Alibi:
    return Alibi(jnp.asarray(alibi_slopes(config.num_heads)))


def _relative(config: Config, causal: bool) -> Any:
    return RelativeTable(config, two_sided=not causal, name="relative_bias")()


BIAS: dict[str, Callable[[Config, bool], PositionBias]] = {"alibi": _alibi, "relative": _relative}
"""What a stack adds to the scores of its self-attention, from its config and whether it is causal."""

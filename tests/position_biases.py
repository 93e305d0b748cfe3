"""Two small biases of positions, of the kinds that kernels must take: elementwise, with sums but no gathers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jaxformer.attention import PositionBias
from jaxformer.trees import Leaf


def distances(q_positions, kv_positions):
    return kv_positions[:, None, None, :] - q_positions[:, None, :, None]


@partial(jax.tree_util.register_dataclass, data_fields=["slopes"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Linear(PositionBias):
    """-slope |distance|, slopes [N]."""

    slopes: Leaf

    def __call__(self, q_positions, kv_positions):
        return -self.slopes[:, None, None] * jnp.abs(distances(q_positions, kv_positions)).astype(jnp.float32)


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Table(PositionBias):
    """The entry of the distance in a table [N R], clipped to -R/2 .. R/2-1."""

    table: Leaf

    def __call__(self, q_positions, kv_positions):
        R = self.table.shape[1]
        bucket = jnp.clip(distances(q_positions, kv_positions) + R // 2, 0, R - 1)
        bias = jnp.zeros((), jnp.float32)
        for r in range(R):
            entry = jnp.where(jnp.arange(R) == r, self.table, 0).sum(axis=1)
            bias = jnp.where(bucket == r, entry[:, None, None], bias)
        return bias

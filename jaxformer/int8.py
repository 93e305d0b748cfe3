"""Weights in 8 bits, for decoding: each kernel as integers with one float32 scale for each of its outputs.

    W ~ q s,    s = max |W| / 127 over the inputs,    q = round(W / s)

A pure function of parameters: `model.apply`, `generate` and all else take the result as they take the floats, of every
model, in a loop over layers or a scan. Embeddings, norms and biases stay what they are, and so does a head tied to the
embeddings. It cannot be trained.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from jaxformer.sharding import kernel_axes
from jaxformer.trees import Leaf, path_name


@partial(jax.tree_util.register_dataclass, data_fields=["q", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Int8Kernel:
    """A kernel in int8, `q` of its shape, and `scale`, whose axes of inputs are 1."""

    q: Leaf
    scale: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return self.q.shape

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the numbers that it stands for, each off by at most half a scale."""
        return (self.q.astype(jnp.float32) * self.scale).astype(dtype)


def quantize(params: Any) -> Any:
    """Returns the parameters with every kernel as an `Int8Kernel`.

    Raises:
      ValueError: kernels that are in int8 already, or hold NaN or infinity.
      KeyError: a kernel of no known letters.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path_name(path)
        if isinstance(leaf, Int8Kernel):
            raise ValueError(f"{name} is in int8 already")
        return _quantized(name, leaf) if name.endswith("/kernel") else leaf

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=_is_int8)


def dequantize(params: Any, dtype: DTypeLike = "float32") -> Any:
    """Returns the parameters with floats again, which are those that the model computes with."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_int8(leaf) else leaf, params, is_leaf=_is_int8)


def errors(params: Any, quantized: Any) -> dict[str, float]:
    """Returns how far each kernel is off, by its path: the root mean square of the error over that of the kernel.

    Args:
      params: in floats.
      quantized: what `quantize` made of them.
    """

    def one(kernel: Any, found: Any) -> float:
        exact = jnp.asarray(kernel, jnp.float32)
        off = jnp.square(found.astype(jnp.float32) - exact).mean()
        return float(jnp.sqrt(off / jnp.maximum(jnp.square(exact).mean(), jnp.finfo(jnp.float32).tiny)))

    exact = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    found = jax.tree_util.tree_leaves_with_path(quantized, is_leaf=_is_int8)
    return {path_name(path): one(exact[path_name(path)], leaf) for path, leaf in found if _is_int8(leaf)}


def _is_int8(leaf: Any) -> bool:
    return isinstance(leaf, Int8Kernel)


def _quantized(name: str, kernel: Any) -> Int8Kernel:
    made = _round(jnp.asarray(kernel), kernel_axes(name)[0])
    if not isinstance(made.scale, jax.core.Tracer) and not np.isfinite(made.scale).all():
        raise ValueError(f"{name} holds NaN or infinity, which int8 cannot")
    return made


@partial(jax.jit, static_argnums=1)
def _round(kernel: Array, inputs: tuple[int, ...]) -> Int8Kernel:
    kernel = kernel.astype(jnp.float32)
    # A scale below the smallest normal number would be flushed to 0, and all weights of its output with it.
    scale = jnp.maximum(jnp.abs(kernel).max(axis=inputs, keepdims=True) / 127, jnp.finfo(jnp.float32).tiny)
    return Int8Kernel(jnp.round(kernel / scale).astype(jnp.int8), scale)

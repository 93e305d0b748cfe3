"""Pure functions of parameter trees: between per-layer and stacked layouts, and sizes.

A Python loop over layers keeps `layers_0`, `layers_1`, ...; `nn.scan` keeps one `layers` whose leaves have a leading
axis L. `stack_layers` and `unstack_layers` are exact inverses, at every depth of the tree.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Leaf = Any
"""A field of a pytree: an array, or what a transformation puts in its place, such as a shape or a sharding."""

_LAYER = re.compile(r"layers_(\d+)")


def stack_layers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree with each run `layers_0 .. layers_{L-1}` stacked into one `layers` (axis 0).

    Raises:
      ValueError: a run with a gap, or beside a `layers` that is stacked already.
    """
    out: dict[str, Any] = {}
    layers: dict[int, Any] = {}
    for name, value in tree.items():
        match = _LAYER.fullmatch(name)
        if match:
            layers[int(match[1])] = value
        else:
            out[name] = stack_layers(value) if isinstance(value, Mapping) else value
    if layers:
        if "layers" in out:
            raise ValueError(f"the tree holds both 'layers' and {sorted(layers)} of 'layers_i'; it is half stacked")
        if sorted(layers) != list(range(len(layers))):
            raise ValueError(f"layers {sorted(layers)} have a gap; stacking needs layers_0 .. layers_{len(layers) - 1}")
        out["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in range(len(layers))))
    return out


def unstack_layers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree with each stacked `layers` split into `layers_0`, `layers_1`, ...; undoes `stack_layers`.

    Raises:
      ValueError: leaves of one `layers` that differ in their number of layers.
    """
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if name == "layers":
            depths = sorted({leaf.shape[0] for leaf in jax.tree.leaves(value)})
            if len(depths) != 1:
                raise ValueError(f"the leaves of 'layers' have {depths} layers; stacked ones all have the same number")
            for i in range(depths[0]):
                out[f"layers_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], value)
        else:
            out[name] = unstack_layers(value) if isinstance(value, Mapping) else value
    return out


def num_parameters(tree: Any) -> int:
    """Counts the elements of all leaves (arrays or their shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    """Counts the bytes of all leaves (arrays or their shapes)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def path_name(path: tuple[Any, ...]) -> str:
    """Writes a jax key path as 'decoder/layers_0/attn/q_proj/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")

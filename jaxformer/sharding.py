"""Which axis of the machine holds which axis of an array.

A parameter's path gives its dimension letters, and a letter gives a mesh axis:

    decoder/layers_0/attn/q_proj/kernel  ->  D N H  ->  PartitionSpec("fsdp", "tensor", None)

Modules carry no sharding metadata. Optimizer moments have the parameters' paths as suffix and so the same layout.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxformer.trees import path_name

MESH_AXES = ("data", "fsdp", "tensor")
"""data splits the batch; fsdp splits the batch and the parameters' width D; tensor splits heads, F and V."""

LETTER_AXES: dict[str, tuple[str, ...]] = {
    "B": ("data", "fsdp"),
    "D": ("fsdp",),
    "N": ("tensor",),
    "K": ("tensor",),
    "F": ("tensor",),
    "V": ("tensor",),
    "T": (),
    "A": (),
    "H": (),
    "L": (),
    "P": (),
    "R": (),
    "E": ("fsdp",),
    "O": (),
    "Y": (),
    "r": (),
}
"""Dimension letter -> the mesh axes that split it."""

RULES: tuple[tuple[str, str], ...] = (
    (r"(target_)?embed/token/embedding", "VE"),
    (r"(target_)?embed/position/embedding", "PE"),
    (r"(target_)?embed/type/embedding", "AE"),
    (r"(target_)?embed/norm/(scale|bias)", "E"),
    (r"(target_)?embed/proj/kernel", "ED"),
    (r"(target_)?embed/proj/bias", "D"),
    (r"q_proj/kernel", "DNH"),
    (r"q_proj/bias", "NH"),
    (r"[kv]_proj/kernel", "DKH"),
    (r"[kv]_proj/bias", "KH"),
    (r"o_proj/kernel", "NHD"),
    (r"(up|gate)_proj/kernel", "DF"),
    (r"(up|gate)_proj/bias", "F"),
    (r"down_proj/kernel", "FD"),
    (r"(o|down)_proj/bias", "D"),
    (r"((attn|cross|mlp)(_out)?|final)_norm/(scale|bias)", "D"),
    (r"[qk]_norm/(scale|bias)", "H"),
    (r"relative_bias/embedding", "RN"),
    (r"lm_head/transform_proj/kernel", "DE"),
    (r"lm_head/transform_(proj/bias|norm/(scale|bias))", "E"),
    (r"lm_head/kernel", "EV"),
    (r"lm_head/bias", "V"),
    (r"pooler_proj/kernel", "DO"),
    (r"pooler_proj/bias", "O"),
    (r"label_proj/kernel", "DY"),
    (r"label_proj/bias", "Y"),
)
"""The end of a parameter's path (whole components) -> its dimension letters, without the L of stacked layers."""


def _inputs(dims: str) -> str:
    """Returns the letters of a kernel that are summed over: the first, and of what gathers the heads both of theirs."""
    return "NH" if dims == "NHD" else dims[0]


LOW_RANK_RULES = tuple(
    rule
    for pattern, dims in RULES
    if pattern.endswith("kernel")
    for rule in (
        (f"{pattern}/lora_a", _inputs(dims) + "r"),
        (f"{pattern}/lora_b", "r" + dims.removeprefix(_inputs(dims))),
    )
)
"""The same of the factors of kernels, see `lora`."""


WHOLE = frozenset({"v_row", "v_col", "ns_coeffs"})
"""Parts of the states of optimizers that are no array of a parameter's shape, and are replicated: Adafactor's rows and
columns of moments, Muon's coefficients."""


def letters(path: str) -> str:
    """Returns the dimension letters of a parameter's path.

    Raises:
      KeyError: no rule, or more than one, fits the path.
    """
    found = [dims for pattern, dims in RULES + LOW_RANK_RULES if re.search(rf"(^|/){pattern}$", path)]
    if len(found) != 1:
        raise KeyError(f"{len(found)} sharding rules fit parameter {path!r}; give it exactly one in sharding.RULES")
    return ("L" if "layers" in path.split("/") else "") + found[0]


def kernel_axes(path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns which axes of a kernel are summed over, and which are those of its output; L is neither.

    Raises:
      KeyError: as `letters`.
    """
    dims = letters(path)
    inputs = _inputs(dims.removeprefix("L"))
    return tuple(map(dims.index, inputs)), tuple(map(dims.index, dims.removeprefix("L").removeprefix(inputs)))


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """Makes a mesh over all devices from sizes such as {"data": 2, "fsdp": 4}; axes not named have size 1.

    Raises:
      ValueError: an unknown axis, a size below 1, or sizes whose product is not the number of devices.
    """
    unknown = set(axes) - set(MESH_AXES)
    if unknown:
        raise ValueError(f"mesh axes {sorted(unknown)} are unknown; choose from {list(MESH_AXES)}")
    shape = tuple(axes.get(name, 1) for name in MESH_AXES)
    if min(shape) < 1:
        raise ValueError(f"the mesh sizes {dict(axes)} must be at least 1")
    if math.prod(shape) != jax.device_count():
        sizes = dict(zip(MESH_AXES, shape, strict=True))
        raise ValueError(f"the mesh {sizes} has {math.prod(shape)} places for {jax.device_count()} devices")
    # Auto: under the Explicit default linen's plain products and gathers are refused.
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(dims: str) -> PartitionSpec:
    """Returns the partition of an array by its dimension letters, such as "BTD".

    A mesh axis goes to the first letter that asks for it: D is split in parameters, and whole in activations, where the
    batch has its axis already.
    """
    free, parts = list(MESH_AXES), []
    for letter in dims:
        axes = [axis for axis in LETTER_AXES[letter] if axis in free]
        free = [axis for axis in free if axis not in axes]
        parts.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*parts)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree of NamedShardings for parameters or a whole training state.

    Scalars and arrays of one number are replicated, and so is what `WHOLE` names.

    Raises:
      KeyError: a leaf without a rule of its own.
      ValueError: a rank other than the rule's, or a size that its mesh axis does not divide.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        if leaf.size == 1 or WHOLE & set(name.split("/")):
            return NamedSharding(mesh, PartitionSpec())
        dims = letters(name)
        if len(dims) != leaf.ndim:
            raise ValueError(f"{name} has shape {leaf.shape}, but its rule says {dims}; correct it in sharding.RULES")
        partition = spec(dims)
        for dim, size, axis in zip(dims, leaf.shape, partition, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{name}: size {dim}={size} is not a multiple of mesh axis {axis}={mesh.shape[axis]}; "
                    "change the size or the mesh"
                )
        return NamedSharding(mesh, partition)

    return jax.tree_util.tree_map_with_path(one, tree)


def constrain(x: Array, dims: str) -> Array:
    """Tells the compiler how an activation lies on the mesh of `jax.set_mesh`; without a mesh, returns x as it is.

    Where an axis does not divide the size (one prompt on two devices), that dimension is left whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(MESH_AXES) <= set(mesh.axis_names):
        return x
    parts = []
    for size, axes in zip(x.shape, spec(dims), strict=True):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        parts.append(axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*parts))

"""Low-rank updates of kernels: what is trained is small, and adding it to the kernels gives a plain model again.

W' = W + (alpha / r) A B,    A [inputs r] at random, B [r outputs] zero at first              (Hu et al. 2022)

params = {"base": params, "lora": lora.init(key, params, rank=8)}
step = make_train_step(model, lora.optimizer(adamw(1e-3)), objective=lora.objective(next_token))
model.apply({"params": lora.merged(state.params)}, ids)
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from jaxformer.objectives import Objective
from jaxformer.sharding import kernel_axes
from jaxformer.trees import path_name


def init(key: Key[Array, ""], params: Any, *, rank: int, modules: Sequence[str] | None = None) -> dict[str, Any]:
    """Makes the factors of kernels of the stacks, in a tree like that of the parameters; they change nothing at first.

    Args:
      rank: r, the inner size of the factors.
      modules: the modules whose kernels get them, such as "q_proj" and "v_proj". None: all.

    Raises:
      ValueError: a rank below 1, or modules of which there is no kernel.
    """
    if rank < 1:
        raise ValueError(f"rank={rank} must be at least 1")
    kernels = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    kernels = {name: leaf for name, leaf in kernels.items() if _is_of_stack(name)}
    there = {name.split("/")[-2] for name in kernels}
    if missing := sorted(set(modules or ()) - there):
        raise ValueError(f"the stacks have no kernels of {missing}; choose of {sorted(there)}")
    tree: dict[str, Any] = {}
    for number, (name, kernel) in enumerate(kernels.items()):
        *parents, module, _ = name.split("/")
        if modules is None or module in modules:
            at = tree
            for parent in (*parents, module):
                at = at.setdefault(parent, {})
            at["kernel"] = _factors(jax.random.fold_in(key, number), name, kernel, rank)
    return tree


def _is_of_stack(name: str) -> bool:
    return name.startswith(("encoder/", "decoder/")) and name.endswith("/kernel")


def _factors(key: Array, name: str, kernel: Array, rank: int) -> dict[str, Array]:
    inputs, outputs = kernel_axes(name)
    layers = kernel.shape[: min(inputs)]
    rows, columns = (tuple(kernel.shape[axis] for axis in axes) for axes in (inputs, outputs))
    a = jax.random.normal(key, (*layers, *rows, rank), jnp.float32) / math.sqrt(math.prod(rows))
    return {"lora_a": a, "lora_b": jnp.zeros((*layers, rank, *columns), jnp.float32)}


def merged(params: dict[str, Any], *, alpha: float = 16.0) -> Any:
    """Returns plain parameters: those of `params["base"]` with the products of `params["lora"]` added to them.

    Args:
      alpha: the update is alpha / r times the product, so that the rank can change and the learning rate stay.
    """

    def one(path: tuple[Any, ...], kernel: Array) -> Array:
        factors = params["lora"]
        for part in path:
            factors = factors.get(part.key) if isinstance(factors, dict) else None
        if factors is None:
            return kernel
        a, b = factors["lora_a"], factors["lora_b"]
        has_layers = len(kernel_axes(path_name(path))[0]) + 1 < a.ndim
        product = jax.vmap(partial(jnp.tensordot, axes=1)) if has_layers else partial(jnp.tensordot, axes=1)
        rank = b.shape[1 if has_layers else 0]
        return (kernel.astype(jnp.float32) + alpha / rank * product(a, b)).astype(kernel.dtype)

    return jax.tree_util.tree_map_with_path(one, params["base"])


def objective(wrapped: Objective, *, alpha: float = 16.0) -> Objective:
    """Returns the objective of {"base", "lora"}, whose gradient at the base is 0.

    Args:
      wrapped: of plain parameters.
      alpha: as of `merged`.
    """

    def low_rank(model: Any, params: Any, batch: Any, dropout_key: Array | None = None) -> tuple[Array, Array]:
        frozen = {"base": jax.lax.stop_gradient(params["base"]), "lora": params["lora"]}
        return wrapped(model, merged(frozen, alpha=alpha), batch, dropout_key)

    return low_rank


def optimizer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer of {"base", "lora"} that leaves the base alone and keeps no state for it.

    Args:
      inner: it sees the factors only, none of which is a kernel by its name: `decay_mask` spares them.
    """
    return optax.partition({"base": optax.set_to_zero(), "lora": inner}, {"base": "base", "lora": "lora"})

"""A name for an activation, so that it can be read or replaced from outside.

`tap(module, "pattern", value)` stores the value when the caller asked for the `intermediates` collection, and replaces
it when the caller passed a function under the same path in the `edits` collection:

    _, read = model.apply({"params": p}, ids, mutable=["intermediates"])
    edits = {"decoder": {"layers_0": {"attn": {"z": jax.tree_util.Partial(jnp.zeros_like)}}}}
    logits = model.apply({"params": p, "edits": edits}, ids)

Both work under jit, grad, vmap and scan, and an unread tap costs nothing. A tap may not share a submodule's name.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jaxtyping import Array

COLLECTIONS: dict[Any, Any] = {"intermediates": 0, "edits": 0}
"""The collections of taps with the axis along which `nn.scan` stacks the layers."""


def tap(module: nn.Module, name: str, value: Array) -> Array:
    """Returns the value, or what the edit of this name makes of it; the stored value is the one after the edit.

    Raises:
      ValueError: an edit that changes shape or dtype.
    """
    if module.has_variable("edits", name):
        edit: Callable[[Array], Array] = module.get_variable("edits", name)
        edited = edit(value)
        if (edited.shape, edited.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"the edit of {'/'.join((*module.path, name))} returned {edited.dtype}{list(edited.shape)}; "
                f"it must keep {value.dtype}{list(value.shape)}"
            )
        value = edited
    # The newest value, without the tuple that sow makes by default.
    module.sow("intermediates", name, value, init_fn=lambda: None, reduce_fn=lambda _, new: new)
    return value


def tapped(module: nn.Module, name: str) -> bool:
    """Says whether anyone reads or edits this tap, for values that would have to be computed for it alone."""
    return module.is_mutable_collection("intermediates") or module.has_variable("edits", name)

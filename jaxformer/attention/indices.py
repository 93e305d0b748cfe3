"""What can be known of a mask before tracing, for kernels that know indices and not positions.

    q_positions[t] - kv_positions[s] = t - s   within a document   <=   `ordered`, and q and kv are the same tokens

Such a kernel may read causal order and windows off the indices where this holds. A kernel that cannot be sure of it
must refuse: its numbers would be those of another mask.
"""

from typing import Any

import jax
import numpy as np

from jaxformer.masks import Mask


def known(x: Any) -> bool:
    """Returns whether the values of x can be read now: False for a traced array."""
    return not isinstance(x, jax.core.Tracer)


def same(x: Any, y: Any) -> bool:
    """Returns whether x and y are surely equal: one object, traced or not, or known arrays of equal values."""
    if x is y:
        return True
    return x is not None and y is not None and known(x) and known(y) and np.array_equal(x, y)


def aligned(mask: Mask) -> bool:
    """Returns whether differences of indices are surely differences of positions; False also where it is not known.

    q and kv of a mask are known to be the same tokens if they were made from one array: they stay one through `jit`.
    """
    alike = same(mask.q_positions, mask.kv_positions) and same(mask.q_segments, mask.kv_segments)
    return mask.ordered and alike


def unpadded(positions: Any) -> bool:
    """Returns whether every place surely holds a token; False also where it is not known."""
    return known(positions) and bool((np.asarray(positions) >= 0).all())


def refuse(name: str, given: dict[str, tuple[Any, str]]) -> None:
    """Refuses every argument that is not None.

    Args:
      name: the implementation.
      given: what the argument is called -> the argument, and the implementations that can honour it.

    Raises:
      ValueError: an argument is given.
    """
    for what, (argument, others) in given.items():
        if argument is not None:
            raise ValueError(f"{name!r} cannot honour {what}; use implementation={others}")

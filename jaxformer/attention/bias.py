"""A score bias that is a function of positions, so that blocks of it can be made where they are needed.

scores[b, n, t, s] = scale * q . k + bias(q_positions, kv_positions)[b, n, t, s]
"""

import abc
from typing import Any

import jax
from jaxtyping import Array, Float, Int


class PositionBias(abc.ABC):
    """A pytree whose leaves all have the heads N as their first axis, and a function of positions.

    The same head of every leaf makes the bias of that head alone: kernels that go head by head rely on it. A function
    that is not one of these is a bias too (any pytree that can be called), but not for such kernels. Gradients flow to
    the leaves.
    """

    @abc.abstractmethod
    def __call__(self, q_positions: Int[Array, "#b t"], kv_positions: Int[Array, "#b s"]) -> Float[Array, "b N t s"]:
        """Returns the float32 bias of these queries and keys; it depends on nothing but their positions."""

    def pullback(
        self, q_positions: Int[Array, "#b t"], kv_positions: Int[Array, "#b s"], gradient: Float[Array, "b N t s"]
    ) -> Any:
        """Returns the gradient of the leaves from that of the bias, as a pytree like this one."""
        return jax.vjp(lambda bias: bias(q_positions, kv_positions), self)[1](gradient)[0]

"""Optimizers as optax chains that know the roles of parameters, and a rule for steps that had better not be taken.

    params <- params - rate (direction(clipped gradient) + weight_decay params)

Weight decay is decoupled (Loshchilov and Hutter 2019, algorithm 2) and acts on the kernels of projections alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxformer.sharding import kernel_axes
from jaxformer.trees import path_name


def decay_mask(params: Any) -> Any:
    """Says which parameters weight decay acts on: the kernels of projections, found by their role in the tree.

    Embeddings, biases and norm scales are left alone. The number of axes would be no sign: stacked layers add one.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path).endswith("/kernel"), params)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Makes AdamW with decay on kernels only, after clipping the gradient to a global norm of `clip_norm`.

    Raises:
      ValueError: a negative decay, or a clip norm that is not positive.

    References:
      Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
    """
    return _chain(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), learning_rate, weight_decay, clip_norm)


def lion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Makes Lion, whose direction is a sign: one moment instead of two, and a rate some three to ten times lower.

    Raises:
      ValueError: as `adamw`.

    References:
      Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
    """
    return _chain(optax.scale_by_lion(b1=b1, b2=b2), learning_rate, weight_decay, clip_norm)


def adafactor(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.0,
    decay_rate: float = 0.8,
    clip_norm: float = 1.0,
    min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformation:
    """Makes Adafactor without momentum: rows and columns of second moments, steps in proportion to the parameter.

    Args:
      decay_rate: exponent c of the second moment's decay, 1 - t^-c.
      min_dim_size_to_factor: a parameter whose second largest axis is smaller keeps its whole second moment.

    Raises:
      ValueError: as `adamw`.

    References:
      Shazeer and Stern 2018, "Adafactor", algorithms 4 to 6.
    """
    direction = optax.chain(
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return _chain(direction, learning_rate, weight_decay, clip_norm)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Makes Muon for the kernels of the stacks, and Adam for embeddings, heads, norms and biases.

    A kernel's axes that are summed over are the rows of its matrix, and its others the columns; stacked layers are
    matrices of their own. Its steps are scaled to the size of Adam's, so that one rate serves both.

    Args:
      momentum: of Muon; b1, b2: of Adam.

    Raises:
      ValueError: as `adamw`.

    References:
      Jordan 2024, "Muon: an optimizer for hidden layers"; Liu et al. 2025, "Muon is scalable for LLM training",
      section 2.2, where the scale 0.2 is from.
    """
    matrices = optax.contrib.muon(1.0, beta=momentum, consistent_rms=0.2, muon_weight_dimension_numbers=_matrices)
    # It descends by itself, as `_chain` does.
    parts = {True: optax.chain(matrices, optax.scale(-1.0)), False: optax.scale_by_adam(b1=b1, b2=b2)}
    return _chain(optax.partition(parts, _is_matrix), learning_rate, weight_decay, clip_norm)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "adafactor": adafactor,
    "lion": lion,
    "muon": muon,
}
"""Each takes (learning_rate, *, weight_decay, clip_norm) and options of its own."""


def _chain(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    if not weight_decay >= 0 or not clip_norm > 0:
        raise ValueError(f"weight_decay={weight_decay} must not be negative and clip_norm={clip_norm} must be positive")
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        direction,
        optax.add_decayed_weights(weight_decay, decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _is_matrix(params: Any) -> Any:
    """Says which parameters are kernels of the stacks."""

    def one(path: tuple[Any, ...], _: Any) -> bool:
        name = path_name(path)
        return name.startswith(("encoder/", "decoder/")) and name.endswith("/kernel")

    return jax.tree_util.tree_map_with_path(one, params)


def _matrices(kernels: Any) -> Any:
    """Returns the axes of each kernel as those of a matrix."""

    def one(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers:
        inputs, outputs = kernel_axes(path_name(path))
        return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)

    return jax.tree_util.tree_map_with_path(one, kernels)


# Steps that are not taken ---------------------------------------------------------------------------------------------


class SkipState(NamedTuple):
    """State of `skip_spikes`: updates seen and skipped [] int32, mean norm [] float32, and what it wraps."""

    seen: Array
    skipped: Array
    mean_norm: Array
    inner: Any


def skip_spikes(
    inner: optax.GradientTransformation, *, factor: float | None = None, decay: float = 0.98, after: int = 50
) -> optax.GradientTransformation:
    """Leaves out updates whose loss or gradient is not finite, or far larger than usual: parameters and `inner` stay.

    What was left out is counted in the state, which training steps report as the metric `skipped`.

    Args:
      factor: an update is left out too if its norm is above `factor` times the running mean. A norm enters the mean
        with at most that size, so that a run whose gradients stay large goes on after a while. None: no such rule.
      decay: of the running mean, per update.
      after: updates before the mean counts for anything.

    The loss is the argument `value` of the update, as optax has it; training steps give it.

    Raises:
      ValueError: a factor that is not above 1, a decay outside of [0, 1), or `after` below 1.
    """
    if (factor is not None and not factor > 1) or not 0 <= decay < 1 or after < 1:
        raise ValueError(
            f"factor={factor} must be above 1 or None, decay={decay} from 0 up to, but without, 1, and after={after} "
            "at least 1"
        )
    limit = jnp.inf if factor is None else factor

    def init(params: Any) -> SkipState:
        return SkipState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros(()), inner.init(params))

    def update(
        gradients: Any, state: SkipState, params: Any = None, *, value: Any = 0.0, **_: Any
    ) -> tuple[Any, SkipState]:
        norm = optax.tree.norm(gradients)
        most = jnp.where((state.seen < after) | (factor is None), jnp.inf, limit * state.mean_norm)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(value)
        taken = is_finite & (norm <= most)
        updates, new = jax.lax.cond(
            taken,
            lambda: inner.update(gradients, state.inner, params),
            lambda: (jax.tree.map(jnp.zeros_like, gradients), state.inner),
        )
        # The mean of the first n norms while they are few, and a running one from then on.
        kept = jnp.minimum(decay, state.seen / (state.seen + 1))
        mean_norm = kept * state.mean_norm + (1 - kept) * jnp.minimum(norm, most)
        return updates, SkipState(
            state.seen + is_finite,
            state.skipped + ~taken,
            jnp.where(is_finite, mean_norm, state.mean_norm),
            new,
        )

    return optax.GradientTransformationExtraArgs(init, update)

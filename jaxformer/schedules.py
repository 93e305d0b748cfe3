"""Learning rates over the steps of a run: a linear rise from 0 to the peak, and what follows it."""

from collections.abc import Callable

import jax.numpy as jnp
import optax


def warmup_cosine(peak: float, warmup_steps: int, num_steps: int, final_fraction: float = 0.1) -> optax.Schedule:
    """Rises linearly from 0 to `peak`, then falls along a half cosine to `final_fraction * peak` at `num_steps`.

    Raises:
      ValueError: a warm-up that is not shorter than the run.

    References:
      Loshchilov and Hutter 2017, "SGDR", equation 5.
    """
    _check(warmup_steps, num_steps)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, num_steps, end_value=final_fraction * peak)


def warmup_linear(peak: float, warmup_steps: int, num_steps: int, final_fraction: float = 0.0) -> optax.Schedule:
    """Rises as `warmup_cosine` does, then falls in a line to `final_fraction * peak` at `num_steps`.

    Raises:
      ValueError: a warm-up that is not shorter than the run.

    References:
      Devlin et al. 2019, "BERT", section A.2.
    """
    return warmup_stable_decay(peak, warmup_steps, num_steps, final_fraction, decay_steps=num_steps - warmup_steps)


def warmup_inverse_sqrt(peak: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
    """Rises linearly to `peak`, then falls with one over the root of the step, whatever the run's length.

    Raises:
      ValueError: a warm-up that is not shorter than the run, or of no step.

    References:
      Vaswani et al. 2017, "Attention is all you need", equation 3; there peak = (d_model warmup_steps)^-0.5.
    """
    _check(warmup_steps, num_steps)
    if warmup_steps == 0:
        raise ValueError("warmup_steps=0 must be at least 1: the rate at step t is peak sqrt(warmup_steps / t)")

    def schedule(step: int) -> jnp.ndarray:
        t = jnp.asarray(step, jnp.float32)
        return peak * jnp.minimum(t / warmup_steps, jnp.sqrt(warmup_steps / jnp.maximum(t, 1)))

    return schedule


def warmup_stable_decay(
    peak: float, warmup_steps: int, num_steps: int, final_fraction: float = 0.0, *, decay_steps: int | None = None
) -> optax.Schedule:
    """Rises as `warmup_cosine` does, stays at `peak`, then falls in a line to `final_fraction * peak`.

    Args:
      decay_steps: how many of the last steps the fall takes; None: a fifth of the run, or what the warm-up leaves.

    Raises:
      ValueError: a warm-up that is not shorter than the run, or a fall that the steps after it have no room for.

    References:
      Hu et al. 2024, "MiniCPM", section 4.2.
    """
    _check(warmup_steps, num_steps)
    most = num_steps - warmup_steps
    decay_steps = min(max(num_steps // 5, 1), most) if decay_steps is None else decay_steps
    if not 1 <= decay_steps <= most:
        raise ValueError(f"decay_steps={decay_steps} must be from 1 to the {most} steps that follow the warm-up")
    rise = optax.linear_schedule(0.0, peak, warmup_steps) if warmup_steps else optax.constant_schedule(peak)
    fall = optax.linear_schedule(peak, final_fraction * peak, decay_steps, num_steps - decay_steps - warmup_steps)
    return optax.join_schedules([rise, fall], [warmup_steps])


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "cosine": warmup_cosine,
    "linear": warmup_linear,
    "inverse_sqrt": warmup_inverse_sqrt,
    "stable_decay": warmup_stable_decay,
}
"""Each takes (peak, warmup_steps, num_steps)."""


def _check(warmup_steps: int, num_steps: int) -> None:
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and below num_steps={num_steps}")

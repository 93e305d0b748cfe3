"""The optimizer recipe of the language models here: AdamW with a warm-up and a cosine, as optax chains."""

from typing import Any

import jax
import optax

from jaxformer.trees import path_name


def warmup_cosine(peak: float, warmup_steps: int, num_steps: int, final_fraction: float = 0.1) -> optax.Schedule:
    """Rises linearly from 0 to `peak`, then falls along a half cosine to `final_fraction * peak` at `num_steps`.

    Raises:
      ValueError: a warm-up that is not shorter than the run.

    References:
      Loshchilov and Hutter 2017, "SGDR", equation 5.
    """
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and below num_steps={num_steps}")
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, num_steps, end_value=final_fraction * peak)


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
    if not weight_decay >= 0 or not clip_norm > 0:
        raise ValueError(f"weight_decay={weight_decay} must not be negative and clip_norm={clip_norm} must be positive")
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask),
    )

"""Learning from pairs of answers, of which one is preferred.

r(y) = log p(y | x) - log p_ref(y | x),    m = r(chosen) - r(rejected)

dpo      -log sigmoid(b m)                                       (Rafailov et al. 2023, equation 7)
ipo      (m - 1 / 2b)^2                                          (Azar et al. 2024, equation 17)
simpo    -log sigmoid(b (log p(chosen) / |chosen| - log p(rejected) / |rejected|) - g)     (Meng et al. 2024, eq. 6)
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.data import Batch
from jaxformer.losses import weighted_sum
from jaxformer.objectives import next_token
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["logprob", "reference", "length"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Answers:
    """Log-probabilities [B] of answers under the model and under the reference, and their numbers of tokens."""

    logprob: Leaf
    reference: Leaf
    length: Leaf

    @property
    def reward(self) -> Float[Array, " B"]:
        """How much likelier the model finds them than the reference does, in nats."""
        return self.logprob - self.reference


PreferenceLoss = Callable[[Answers, Answers], Array]
"""(chosen, rejected) -> loss [B]."""


def dpo(chosen: Answers, rejected: Answers, *, beta: float = 0.1) -> Float[Array, " B"]:
    """Direct preference optimisation."""
    return -jax.nn.log_sigmoid(beta * (chosen.reward - rejected.reward))


def ipo(chosen: Answers, rejected: Answers, *, beta: float = 0.1) -> Float[Array, " B"]:
    """Identity preference optimisation, whose margin has a goal and does not grow without end."""
    return jnp.square(chosen.reward - rejected.reward - 1 / (2 * beta))


def simpo(chosen: Answers, rejected: Answers, *, beta: float = 2.0, margin: float = 1.0) -> Float[Array, " B"]:
    """Simple preference optimisation: by the mean over tokens, and without a reference."""
    mean_chosen, mean_rejected = (x.logprob / jnp.maximum(x.length, 1) for x in (chosen, rejected))
    return -jax.nn.log_sigmoid(beta * (mean_chosen - mean_rejected) - margin)


LOSSES: dict[str, PreferenceLoss] = {"dpo": dpo, "ipo": ipo, "simpo": simpo}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["chosen", "rejected", "chosen_reference", "rejected_reference"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Preferences:
    """Pairs of texts, prompt and answer each; the labels of the answers have weight 1, and all others 0.

    The references are log-probabilities [B] of the answers under the frozen reference, see `with_reference`; 0 where
    the loss needs none. They are computed once: the reference is then no part of the training step, nor of its memory.
    """

    chosen: Batch
    rejected: Batch
    chosen_reference: Leaf = 0.0
    rejected_reference: Leaf = 0.0


def preference(
    model: nn.Module,
    params: Any,
    batch: Preferences,
    dropout_key: Array | None = None,
    *,
    loss: PreferenceLoss = dpo,
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The objective: the loss of each pair, all of weight 1.

    Args:
      loss: of `LOSSES`, perhaps with other constants: `partial(dpo, beta=0.5)`.
    """
    both = jax.tree.map(lambda *rows: jnp.concatenate(rows), batch.chosen, batch.rejected)
    logprob, length = _logprobs(model, params, both, dropout_key)
    rows = logprob.shape[0] // 2
    chosen = Answers(logprob[:rows], batch.chosen_reference, length[:rows])
    rejected = Answers(logprob[rows:], batch.rejected_reference, length[rows:])
    return loss(chosen, rejected), jnp.ones(rows)


def with_reference(model: nn.Module, params: Any, batch: Preferences) -> Preferences:
    """Returns the pairs with the log-probabilities that a frozen model gives them."""
    chosen, rejected = (_logprobs_jit(model, params, rows) for rows in (batch.chosen, batch.rejected))
    return dataclasses.replace(batch, chosen_reference=chosen, rejected_reference=rejected)


def _logprobs(model: nn.Module, params: Any, rows: Batch, dropout_key: Array | None) -> tuple[Array, Array]:
    """Returns the log-probability of each row's answer, and its number of tokens."""
    losses, weights = next_token(model, params, rows, dropout_key)
    total, count = jax.vmap(weighted_sum)(losses, weights)
    return -total, count


@partial(jax.jit, static_argnames="model")
def _logprobs_jit(model: nn.Module, params: Any, rows: Batch) -> Array:
    return _logprobs(model, params, rows, None)[0]

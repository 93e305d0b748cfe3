"""Training: a pure step, and a loop that can be stopped at any moment.

    loss = sum_t w_t nll_t / sum_t w_t,   params <- params + optimizer(grad loss)

Everything random in step k comes from fold_in(key(seed), k), so that a run resumed at step k is the uninterrupted run.
"""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxformer.data import Batch
from jaxformer.losses import cross_entropy, weighted_mean, weighted_sum
from jaxformer.masks import Mask
from jaxformer.trees import Leaf

Objective = Callable[[nn.Module, Any, Batch, Array | None], tuple[Array, Array]]
"""(model, params, batch, dropout_key or None) -> (loss of each token or row, its weight)."""
TrainStep = Callable[["TrainState", Batch], tuple["TrainState", dict[str, Array]]]
Callback = Callable[[int, "TrainState", dict[str, Array]], None]
"""Called after each step with its number (the first is 1), the state and the metrics, which are still on the device."""


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes: steps taken [] int32, parameters, optimizer state."""

    step: Leaf
    params: Any
    opt_state: Any


def init_state(model: nn.Module, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Makes the state before the first step; the same seed gives the same parameters."""

    @jax.jit
    def init() -> TrainState:
        params = model.init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return init()


def next_token(model: nn.Module, params: Any, batch: Batch, dropout_key: Array | None = None) -> tuple[Array, Array]:
    """The causal language model's objective: nats of each label, and its weight."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    positions, segments = batch.positions, batch.segments
    # Positions of a batch count up within each segment, which kernels that know only indices rely on.
    mask = Mask(positions, positions, segments, segments, causal=True, ordered=True)
    logits: Any = model.apply({"params": params}, batch.ids, positions, segments, mask, rngs=rngs)
    return cross_entropy(logits, batch.labels), batch.weights


def _compiler_options() -> dict[str, str]:
    # jaxlib 0.10's CPU backend fuses products with norms and activations into slow loops. Without those fusions a
    # forward pass alone took as little as a sixth of the time; a training step gained less, at some shapes nothing.
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else {}


def make_train_step(
    model: nn.Module, optimizer: optax.GradientTransformation, *, seed: int = 0, objective: Objective = next_token
) -> TrainStep:
    """Makes the compiled step (state, batch) -> (state, metrics); the old state is donated and must not be used again.

    Metrics: loss in nats per unit of weight, grad_norm before clipping, and the weight of the batch. The step is
    compiled on its own; inside of another `jit` or `scan` use the pure function, `train_step.__wrapped__`.

    Args:
      seed: of dropout, together with the step's number.
      objective: what to minimise, see `Objective`.
    """

    @partial(jax.jit, donate_argnums=0, compiler_options=_compiler_options())
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def loss_fn(params: Any) -> tuple[Array, Array]:
            values, weights = objective(model, params, batch, key)
            return weighted_mean(values, weights), weights.sum()

        (loss, weight), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients), "weight": weight}
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    return train_step


def make_eval_step(
    model: nn.Module, *, objective: Objective = next_token
) -> Callable[[Any, Batch], tuple[Array, Array]]:
    """Makes the compiled (params, batch) -> (sum of weight * loss, sum of weights), without dropout."""

    @partial(jax.jit, compiler_options=_compiler_options())
    def eval_step(params: Any, batch: Batch) -> tuple[Array, Array]:
        return weighted_sum(*objective(model, params, batch, None))

    return eval_step


def evaluate(
    eval_step: Callable[[Any, Batch], tuple[Array, Array]], params: Any, batches: Iterable[Batch]
) -> tuple[float, float]:
    """Returns the total loss in nats and the total weight over all batches."""
    sums = [eval_step(params, batch) for batch in batches]
    # Python floats: a float32 running sum over many batches would lose digits.
    return sum(float(total) for total, _ in sums), sum(float(weight) for _, weight in sums)


def fit(
    state: TrainState,
    train_step: TrainStep,
    batches: Iterator[Batch],
    num_steps: int,
    *,
    callbacks: Sequence[Callback] = (),
) -> TrainState:
    """Trains until the state's step is `num_steps`, or until the first SIGINT (Ctrl-C) or SIGTERM.

    A stop is heeded between two steps, so that the returned state is whole: compare its step with `num_steps` to see
    whether it came. A second signal acts at once.

    Args:
      state: where to start; donated, use the returned one.
      batches: gives the batch of each step in turn; for a resumed run, from the batch after the last one trained on.
      callbacks: run after every step, in this order.

    Raises:
      ValueError: batches that end before the last step.
    """
    with _stop_requested() as stop:
        for step in range(int(state.step) + 1, num_steps + 1):
            batch = next(batches, None)
            if batch is None:
                raise ValueError(f"the batches ended before step {step} of {num_steps}; give one for each step")
            state, metrics = train_step(state, batch)
            for callback in callbacks:
                callback(step, state, metrics)
            if stop.is_set():
                break
    return state


@contextlib.contextmanager
def _stop_requested() -> Iterator[threading.Event]:
    """Turns the first SIGINT or SIGTERM into a set event; outside of the main thread signals are left alone."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def request(*_: Any) -> None:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in signals:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

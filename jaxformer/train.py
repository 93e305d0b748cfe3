"""Training: a pure step, and a loop that can be stopped at any moment.

    loss = sum_t w_t loss_t / sum_t w_t,   params <- params + optimizer(grad loss)

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
from jax.sharding import Mesh
from jaxtyping import Array

from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.losses import weighted_sum
from jaxformer.objectives import Objective, next_token
from jaxformer.optim import SkipState
from jaxformer.sharding import shardings
from jaxformer.trees import Leaf

TrainStep = Callable[["TrainState", Any], tuple["TrainState", dict[str, Array]]]
Callback = Callable[[int, "TrainState", dict[str, Array]], None]
"""Called after each step with its number (the first is 1), the state and the metrics, which are still on the device."""


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes: steps taken [] int32, parameters, optimizer state."""

    step: Leaf
    params: Any
    opt_state: Any


def init_state(
    model: nn.Module, optimizer: optax.GradientTransformation, seed: int, *, mesh: Mesh | None = None
) -> TrainState:
    """Makes the state before the first step; the same seed gives the same parameters, on any mesh.

    Args:
      mesh: where each leaf is made in its shards, as `sharding.shardings` says. None: on the default device.
    """

    def init() -> TrainState:
        ids = [jnp.zeros((1, 1), jnp.int32)] * (2 if isinstance(model, EncoderDecoder) else 1)
        params = model.init(jax.random.key(seed), *ids)["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    layout = None if mesh is None else shardings(jax.eval_shape(init), mesh)
    return jax.jit(init, out_shardings=layout)()


def _compiler_options() -> dict[str, str]:
    # jaxlib 0.10's CPU backend fuses products with norms and activations into slow loops. Without those fusions a
    # forward pass alone took as little as a sixth of the time; a training step gained less, at some shapes nothing.
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else {}


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    objective: Objective = next_token,
    accumulate: int = 1,
) -> TrainStep:
    """Makes the compiled step (state, batch) -> (state, metrics); the old state is donated and must not be used again.

    Metrics: loss in nats per unit of weight, grad_norm before clipping, the weight of the batch, and, under
    `optim.skip_spikes`, how many updates were skipped so far. The step is compiled on its own; inside of another `jit`
    or `scan` use the pure function, `train_step.__wrapped__`.

    Args:
      seed: of dropout, together with the step's number.
      objective: what to minimise, see `Objective`.
      accumulate: parts into which the rows of a batch are split, one after another, so that the activations of one part
        exist at a time. Loss and gradient are those of the whole batch: each token counts by its weight, whatever part
        it is in.

    Raises:
      ValueError: fewer parts than 1, or, from the step, a number of rows that they do not divide.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} must be at least 1 part of a batch")

    update = optax.with_extra_args_support(optimizer).update

    def total(params: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        return weighted_sum(*objective(model, params, batch, key))

    @partial(jax.jit, donate_argnums=0, compiler_options=_compiler_options())
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient = partial(jax.value_and_grad(total, has_aux=True), state.params)
        (loss, weight), gradients = _sum_over_parts(gradient, batch, key, accumulate)
        count = jnp.where(weight > 0, weight, 1)
        gradients = jax.tree.map(lambda leaf: leaf / count, gradients)
        updates, opt_state = update(gradients, state.opt_state, state.params, value=loss / count)
        metrics = {"loss": loss / count, "grad_norm": optax.tree.norm(gradients), "weight": weight}
        if isinstance(opt_state, SkipState):
            metrics["skipped"] = opt_state.skipped
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    return train_step


def _sum_over_parts(function: Callable[..., Any], batch: Any, key: Array, parts: int) -> Any:
    """Returns the sum of function(part, key of the part) over the parts of a batch, in float32."""
    if parts == 1:
        return function(batch, key)
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % parts:
        raise ValueError(f"a batch of {rows} rows cannot be split into accumulate={parts} equal parts")
    # Part i has every parts-th row from row i on: on a mesh each device keeps the rows that it has.
    split = jax.tree.map(lambda leaf: jnp.moveaxis(leaf.reshape(-1, parts, *leaf.shape[1:]), 1, 0), batch)
    one = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], split), key)

    def add(sums: Any, part: tuple[Array, Any]) -> tuple[Any, None]:
        number, rows = part
        return jax.tree.map(jnp.add, sums, function(rows, jax.random.fold_in(key, number))), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), one)
    return jax.lax.scan(add, zeros, (jnp.arange(parts), split))[0]


def make_eval_step(model: nn.Module, *, objective: Objective = next_token) -> Callable[[Any, Any], tuple[Array, Array]]:
    """Makes the compiled (params, batch) -> (sum of weight * loss, sum of weights), without dropout."""

    @partial(jax.jit, compiler_options=_compiler_options())
    def eval_step(params: Any, batch: Any) -> tuple[Array, Array]:
        return weighted_sum(*objective(model, params, batch, None))

    return eval_step


def evaluate(
    eval_step: Callable[[Any, Any], tuple[Array, Array]], params: Any, batches: Iterable[Any]
) -> tuple[float, float]:
    """Returns the total loss in nats and the total weight over all batches."""
    sums = [eval_step(params, batch) for batch in batches]
    # Python floats: a float32 running sum over many batches would lose digits.
    return sum(float(total) for total, _ in sums), sum(float(weight) for _, weight in sums)


def fit(
    state: TrainState,
    train_step: TrainStep,
    batches: Iterator[Any],
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

"""The compiled programs of decoding: one pass over the prompt, then one token after another over a cache.

    cache, token = prefill(prompt)
    repeat: logits, cache = model(token, cache);  token ~ transform(logits, history)

The repeat is one `lax.scan` of a fixed number of steps, which has a gradient, or a `lax.while_loop` that ends when
every row has. What is checked before stands in `generate`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer import sampling
from jaxformer.cache import Cache, init_cache, take_rows
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.history import History
from jaxformer.models import Decoder
from jaxformer.trees import Leaf

Generator = Decoder | EncoderDecoder


class Prompt(NamedTuple):
    """What is continued: token ids and positions [B P], and of a source [B S] if the model reads one."""

    ids: Leaf
    positions: Leaf
    source: Leaf = None
    source_positions: Leaf = None


@partial(
    jax.tree_util.register_dataclass, data_fields=["transform", "key", "eos_ids", "stops", "pad_id"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Choice:
    """How the next token is chosen, and when a row ends; leaves of the program, so that new values recompile nothing.

    Attributes:
      transform: of logits, see `sampling`.
      eos_ids: [n] tokens that end a row.
      stops: [n m] runs of tokens that end a row, padded with -1 on the left; None: there are none.
      pad_id: stands after the end.
    """

    transform: Leaf
    key: Leaf
    eos_ids: Leaf
    stops: Leaf
    pad_id: Leaf

    def __call__(self, logits: Float[Array, "B V"], history: History, done: Array, step: Array) -> tuple[Array, Array]:
        """Returns token and log-probability [B] of the next step."""
        left = self.transform(logits, history)
        token = sampling.draw(jax.random.fold_in(self.key, step), left)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        # A row of which the transforms left nothing must not pass for one that was drawn.
        logprob = jnp.where(jnp.isnan(left).any(axis=-1), jnp.nan, logprob)
        return jnp.where(done, self.pad_id, token), jnp.where(done, 0.0, logprob)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "history", "token", "logprob", "position", "done", "step"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """Between two tokens: the newest one [B] is in the history, but not in the cache yet; `done` rows ended before it.

    `position` [B] is that of the newest token.
    """

    cache: Cache
    history: History
    token: Leaf
    logprob: Leaf
    position: Leaf
    done: Leaf
    step: Leaf

    def ended(self, choice: Choice) -> Bool[Array, " B"]:
        """Returns the rows that end with the newest token, or ended before it."""
        done = self.done | jnp.isin(self.token, choice.eos_ids)
        return done if choice.stops is None else done | self.history.ends_with(choice.stops)


def read_prompt(model: Generator, params: Any, prompt: Prompt, cache: Cache) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits after the last real token of each prompt, and the cache that holds it."""
    apply: Callable[..., Any] = partial(model.apply, {"params": params})
    last = prompt.positions.argmax(axis=1)[:, None, None]
    if isinstance(model, EncoderDecoder):
        memory = apply(prompt.source, prompt.source_positions, method="encode")
        logits, cache = apply(prompt.ids, memory, prompt.positions, cache=cache, method="decode")
        return jnp.take_along_axis(logits, last, axis=1)[:, 0], cache
    x, cache = apply(prompt.ids, prompt.positions, cache=cache, method="hidden")
    # Only the last real token of each row needs logits: [B 1 V] instead of [B P V].
    return apply(jnp.take_along_axis(x, last, axis=1), method="unembed")[:, 0], cache


def read_tokens(
    model: Generator, params: Any, ids: Int[Array, "B T"], positions: Int[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B T V"], Cache]:
    """Returns the logits after each of some more tokens, and the cache that holds them."""
    apply: Callable[..., Any] = partial(model.apply, {"params": params}, ids, cache=cache)
    return apply(positions=positions, method="decode") if isinstance(model, EncoderDecoder) else apply(positions)


def read_token(
    model: Generator, params: Any, token: Int[Array, " B"], position: Int[Array, " B"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits after one more token, and the cache that holds it."""
    logits, cache = read_tokens(model, params, token[:, None], position[:, None], cache)
    return logits[:, 0], cache


def cache_for(model: Generator, prompt: Prompt, capacity: int, kind: str) -> Cache:
    """Returns an empty cache for a prompt and what follows it."""
    # XLA's CPU backend turns a whole bfloat16 cache to float32 and back at each token: 120 ms, not 0.6, of 16384 slots.
    dtype = "float32" if jax.default_backend() == "cpu" else None
    source_len = None if prompt.source is None else prompt.source.shape[1]
    return init_cache(model.config, prompt.ids.shape[0], capacity, dtype=dtype, kind=kind, source_len=source_len)


@partial(jax.jit, static_argnames=("model", "new", "cache_kind", "num_samples"))
def prefill(
    model: Generator,
    params: Any,
    prompt: Prompt,
    choice: Choice,
    cache: Cache | None = None,
    *,
    new: int,
    cache_kind: str,
    num_samples: int,
) -> State:
    """Runs the prompt and chooses the first of `new` tokens, in `num_samples` rows for each prompt."""
    capacity = prompt.ids.shape[1] + new
    if cache is None:
        cache = cache_for(model, prompt, capacity, cache_kind)
    logits, cache = read_prompt(model, params, prompt, cache)
    position, history = prompt.positions.max(axis=1) + 1, History.of_prompt(prompt.ids, prompt.positions, capacity)
    if num_samples > 1:
        rows = jnp.repeat(jnp.arange(logits.shape[0]), num_samples)
        cache, (logits, position, history) = (
            take_rows(cache, rows),
            jax.tree.map(lambda leaf: leaf[rows], (logits, position, history)),
        )
    done, step = position == 0, jnp.zeros((), jnp.int32)
    token, logprob = choice(logits, history, done, step)
    return State(cache, history.append(token, done), token, logprob, position, done, step)


def advance(model: Generator, params: Any, choice: Choice, state: State) -> State:
    """Reads the newest token and chooses the next."""
    done = state.ended(choice)
    # Rows that have ended write empty slots, so that nothing ever sees their padding.
    position, step = jnp.where(done, -1, state.position), state.step + 1
    logits, cache = read_token(model, params, state.token, position, state.cache)
    token, logprob = choice(logits, state.history, done, step)
    return State(cache, state.history.append(token, done), token, logprob, state.position + 1, done, step)


Tokens = tuple[Int[Array, "B new"], Float[Array, "B new"], Bool[Array, "B new"]]
"""Tokens, their log-probabilities, and which of them come before or at the end of their row."""


def _scan(step: Callable[[State], State], choice: Choice, state: State, steps: int) -> tuple[State, Tokens]:
    def body(state: State, _: None) -> tuple[State, Any]:
        state = step(state)
        return state, (state.token, state.logprob, ~state.done)

    first = (state.token, state.logprob, ~state.done)
    state, rest = jax.lax.scan(body, state, None, length=steps)
    tokens, logprobs, live = (
        jnp.concatenate([head[:, None], tail.T], axis=1) for head, tail in zip(first, rest, strict=True)
    )
    return state, (tokens, logprobs, live)


def _while(step: Callable[[State], State], choice: Choice, state: State, steps: int) -> tuple[State, Tokens]:
    shape = (state.token.shape[0], steps + 1)
    empty = jnp.full(shape, choice.pad_id), jnp.zeros(shape), jnp.zeros(shape, bool)
    begin = state.step

    def put(out: Tokens, state: State) -> Any:
        newest = (state.token, state.logprob, ~state.done)
        return tuple(all_.at[:, state.step - begin].set(one) for all_, one in zip(out, newest, strict=True))

    def goes_on(carry: tuple[State, Tokens]) -> Array:
        state = carry[0]
        return (state.step - begin < steps) & ~state.ended(choice).all()

    def body(carry: tuple[State, Tokens]) -> tuple[State, Tokens]:
        state = step(carry[0])
        return state, put(carry[1], state)

    return jax.lax.while_loop(goes_on, body, (state, put(empty, state)))


LOOPS = {"scan": _scan, "while": _while}
"""scan takes every step and has a gradient; while ends with the last row. Both give the same tokens."""


@partial(jax.jit, static_argnames=("model", "steps", "loop"), donate_argnames="state")
def decode(
    model: Generator, params: Any, state: State, choice: Choice, *, steps: int, loop: str = "scan"
) -> tuple[State, Tokens]:
    """Advances by `steps` tokens; returns `steps + 1`, the old state's first."""
    return LOOPS[loop](partial(advance, model, params, choice), choice, state, steps)


@partial(jax.jit, static_argnames=("model", "new", "cache_kind", "num_samples", "loop"))
def run(
    model: Generator,
    params: Any,
    prompt: Prompt,
    choice: Choice,
    cache: Cache | None,
    *,
    new: int,
    cache_kind: str,
    num_samples: int,
    loop: str,
) -> tuple[State, Tokens]:
    """Runs the prompt and chooses all `new` tokens: one program, in which the cache need not be given away.

    Given away between two programs, it would be gone before a gradient could read it.
    """
    state = prefill(model, params, prompt, choice, cache, new=new, cache_kind=cache_kind, num_samples=num_samples)
    return decode(model, params, state, choice, steps=new - 1, loop=loop)

"""Decoding: one pass over the prompt, then one token after another over a cache.

    cache, token = prefill(prompt)
    repeat: logits, cache = model(token, cache);  token ~ transform(logits)

The repeat is one compiled `lax.scan`. Prompts of unequal length share a batch by their positions: -1 is padding, on
either side, and the first real token of a row stands at position 0.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxformer import sampling
from jaxformer.cache import KINDS, Cache, init_cache
from jaxformer.embeddings import check_ids, check_positions
from jaxformer.models import Decoder
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["ids", "lengths", "logprobs"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
      ids: [B new] int32, the new tokens only; the end token is kept and padding follows it.
      lengths: [B] int32, tokens of each row, the end token among them.
      logprobs: [B new] float32, log-probability of each token under the model itself, before any transform; 0 in the
        padding.
    """

    ids: Leaf
    lengths: Leaf
    logprobs: Leaf


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "token", "logprob", "position", "done", "step"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _State:
    """Between two tokens: the newest token [B] is not in the cache yet; `done` rows have ended before it."""

    cache: Cache
    token: Leaf
    logprob: Leaf
    position: Leaf
    done: Leaf
    step: Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["transform", "key", "eos_ids", "pad_id"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Choice:
    """How the next token is chosen; leaves of the compiled program, so that new values recompile nothing."""

    transform: Leaf
    key: Leaf
    eos_ids: Leaf
    pad_id: Leaf

    def __call__(self, logits: Float[Array, "B V"], done: Array, step: Array) -> tuple[Array, Array]:
        token = sampling.sample(jax.random.fold_in(self.key, step), logits, self.transform)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        return jnp.where(done, self.pad_id, token), jnp.where(done, 0.0, logprob)


def generate(
    model: Decoder,
    params: Any,
    ids: Int[Array | np.ndarray, "B P"],
    *,
    positions: Int[Array | np.ndarray, "B P"] | None = None,
    max_new_tokens: int,
    sampler: sampling.Transform = sampling.greedy,
    key: Key[Array, ""] | None = None,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    cache_kind: str = "dense",
) -> Generation:
    """Continues each row of a batch of prompts.

    A row's tokens do not depend on the other rows, on padding, or on the token ids stored in the padding.

    Args:
      positions: of each prompt token; -1 is padding, left or right. None: the prompts are of one length. A row of
        padding only is a filler: it generates nothing.
      max_new_tokens: tokens to generate; prompt and new tokens together must fit the config's max_len.
      sampler: transform of logits, see `sampling`; the token is drawn from what it leaves.
      key: typed key of the draws; not needed by `sampling.greedy`.
      eos_id: the token, or tokens, that end a row; one in the prompt ends nothing.
      pad_id: stands after the end; None: the (first) end token.
      cache_kind: key of `cache.KINDS`.

    Raises:
      ValueError: before anything is traced, for ids or end tokens outside of the vocabulary, prompt and new tokens over
        max_len, positions that do not fit, or a missing key.
      KeyError: an unknown cache kind.
    """
    state, choice = _start(model, params, ids, positions, max_new_tokens, sampler, key, eos_id, pad_id, cache_kind)
    _, tokens, logprobs, live = _decode(model, params, state, choice, steps=max_new_tokens - 1)
    return Generation(tokens, live.sum(axis=1), logprobs)


def stream(
    model: Decoder,
    params: Any,
    ids: Int[Array | np.ndarray, "B P"],
    *,
    positions: Int[Array | np.ndarray, "B P"] | None = None,
    max_new_tokens: int,
    sampler: sampling.Transform = sampling.greedy,
    key: Key[Array, ""] | None = None,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    cache_kind: str = "dense",
) -> Iterator[np.ndarray]:
    """Yields the tokens [B] of `generate`, each as soon as it is known; ends early when every row has ended."""
    state, choice = _start(model, params, ids, positions, max_new_tokens, sampler, key, eos_id, pad_id, cache_kind)
    # A generator of its own: what is wrong with the arguments is raised by the call and not by the first token.
    return _tokens(model, params, state, choice, max_new_tokens)


def _tokens(model: Decoder, params: Any, state: _State, choice: _Choice, max_new_tokens: int) -> Iterator[np.ndarray]:
    eos_ids = np.asarray(choice.eos_ids)
    for left in reversed(range(max_new_tokens)):
        token, done = np.asarray(state.token), np.asarray(state.done)
        yield token
        if left == 0 or (done | np.isin(token, eos_ids)).all():
            return
        state, *_ = _decode(model, params, state, choice, steps=1)


def _start(
    model: Decoder,
    params: Any,
    ids: Any,
    positions: Any,
    max_new_tokens: int,
    sampler: sampling.Transform,
    key: Any,
    eos_id: int | Sequence[int] | None,
    pad_id: int | None,
    cache_kind: str,
) -> tuple[_State, _Choice]:
    """Checks everything, runs the prompt and chooses the first token."""
    # Checked before JAX sees them: it cuts 64 bits down to 32 in silence.
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    check_ids(ids, model.config.vocab_size)
    _check_room(model, ids.shape[1], max_new_tokens, cache_kind)
    positions = _check_positions(model, positions, ids.shape, max_new_tokens)
    eos_ids = [] if eos_id is None else np.ravel(eos_id).tolist()
    pad_id = (eos_ids or [0])[0] if pad_id is None else pad_id
    for name, token in (*(("eos_id", token) for token in eos_ids), ("pad_id", pad_id)):
        if not isinstance(token, int) or not 0 <= token < model.config.vocab_size:
            raise ValueError(f"{name}={token} is outside of the vocabulary of {model.config.vocab_size}")
    if key is None and not isinstance(sampler, sampling.Greedy):
        raise ValueError(f"{sampler} needs a key; pass key=jax.random.key(seed), or sampler=sampling.greedy")
    if key is not None and not (jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key) and key.ndim == 0):
        raise ValueError(
            f"key is {jnp.result_type(key)}{list(jnp.shape(key))}; pass one typed key, jax.random.key(seed)"
        )
    choice = _Choice(
        sampling.as_pytree(sampler),
        jax.random.key(0) if key is None else key,
        jnp.asarray(eos_ids, jnp.int32),
        jnp.asarray(pad_id, jnp.int32),
    )
    capacity = ids.shape[1] + max_new_tokens
    return _prefill(model, params, ids, positions, choice, capacity=capacity, cache_kind=cache_kind), choice


def _check_positions(model: Decoder, positions: Any, shape: tuple[int, ...], max_new_tokens: int) -> Array:
    if positions is None:
        return jnp.broadcast_to(jnp.arange(shape[1]), shape)
    positions = jnp.asarray(positions)
    if positions.shape != shape or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(
            f"positions are {positions.dtype}{list(positions.shape)}; they must be integers of ids' shape "
            f"{list(shape)}, with -1 for padding"
        )
    if not isinstance(positions, jax.core.Tracer) and int(positions.min()) < -1:
        raise ValueError(f"position {int(positions.min())} is below -1; positions count from 0, and -1 is padding")
    if model.config.positions == "learned":
        check_positions(positions + max_new_tokens, model.config.max_len)
    return positions


def _check_room(model: Decoder, prompt: int, max_new_tokens: int, cache_kind: str) -> None:
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be an integer of at least 1")
    if cache_kind not in KINDS:
        raise KeyError(f"cache kind {cache_kind!r} is unknown; choose one of {list(KINDS)}")
    total, most = prompt + max_new_tokens, model.config.max_len
    if total > most:
        raise ValueError(
            f"a prompt of {prompt} and {max_new_tokens} new tokens are {total}, over the context of max_len={most}; "
            "shorten the prompt or ask for fewer tokens"
        )


@partial(jax.jit, static_argnames=("model", "capacity", "cache_kind"))
def _prefill(
    model: Decoder, params: Any, ids: Array, positions: Array, choice: _Choice, *, capacity: int, cache_kind: str
) -> _State:
    B = ids.shape[0]
    # XLA's CPU backend turns a whole bfloat16 cache to float32 and back at each token: 120 ms, not 0.6, of 16384 slots.
    dtype = "float32" if jax.default_backend() == "cpu" else None
    cache = init_cache(model.config, B, capacity, dtype=dtype, kind=cache_kind)
    apply: Callable[..., Any] = partial(model.apply, {"params": params})
    x, cache = apply(ids, positions, cache=cache, method="hidden")
    # Only the last real token of each row needs logits: [B 1 V] instead of [B P V].
    last = positions.argmax(axis=1)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)
    logits = apply(x, method="unembed")[:, 0]
    position, step = positions.max(axis=1) + 1, jnp.zeros((), jnp.int32)
    done = position == 0
    token, logprob = choice(logits, done, step)
    return _State(cache, token, logprob, position, done, step)


@partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="state")
def _decode(
    model: Decoder, params: Any, state: _State, choice: _Choice, *, steps: int
) -> tuple[_State, Array, Array, Array]:
    """Advances by `steps` tokens; returns also tokens, logprobs and liveness [B steps + 1], the old state's first."""
    apply: Callable[..., Any] = partial(model.apply, {"params": params})

    def advance(state: _State, _: None) -> tuple[_State, tuple[Array, Array, Array]]:
        done = state.done | jnp.isin(state.token, choice.eos_ids)
        # Rows that have ended write empty slots, so that nothing ever sees their padding.
        position = jnp.where(done, -1, state.position)
        logits, cache = apply(state.token[:, None], position[:, None], cache=state.cache)
        token, logprob = choice(logits[:, 0], done, state.step + 1)
        new = _State(cache, token, logprob, state.position + 1, done, state.step + 1)
        return new, (token, logprob, ~done)

    first = (state.token, state.logprob, ~state.done)
    state, rest = jax.lax.scan(advance, state, None, length=steps)
    tokens, logprobs, live = (
        jnp.concatenate([head[:, None], tail.T], axis=1) for head, tail in zip(first, rest, strict=True)
    )
    return state, tokens, logprobs, live

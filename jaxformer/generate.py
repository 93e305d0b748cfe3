"""Continuing texts: what is asked for is checked, before anything is traced, and run by `decoding`."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxformer import sampling
from jaxformer.cache import Cache
from jaxformer.decoding import LOOPS, Choice, Generator, State, decode, prefill, run
from jaxformer.prompts import Ids, TargetIds, check_key, check_room, check_tokens, make_prompt, vocab_size_of
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["ids", "lengths", "logprobs", "cache"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
      ids: [B new] int32, the new tokens only; the end token is kept and padding follows it.
      lengths: [B] int32, tokens of each row, the end among them.
      logprobs: [B new] float32, log-probability of each token under the model itself, before any transform; 0 in the
        padding. NaN where the transforms left no token.
      cache: of everything but the last token of each row, which the next prompt has to begin with; only if one was
        given.
    """

    ids: Leaf
    lengths: Leaf
    logprobs: Leaf
    cache: Cache | None = None


def generate(
    model: Generator,
    params: Any,
    ids: Ids,
    *,
    positions: Ids | None = None,
    target_ids: TargetIds | None = None,
    target_positions: TargetIds | None = None,
    max_new_tokens: int,
    sampler: sampling.Transform = sampling.greedy,
    key: Key[Array, ""] | None = None,
    eos_id: int | Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] = (),
    pad_id: int | None = None,
    num_samples: int = 1,
    cache_kind: str = "dense",
    cache: Cache | None = None,
    loop: str = "while",
) -> Generation:
    """Continues each row of a batch of prompts.

    A row's tokens do not depend on the other rows, on padding, or on the token ids stored in the padding.

    Args:
      ids: the prompts; of an encoder-decoder the sources.
      positions: of each token of `ids`; -1 is padding, left or right. None: the rows are of one length, and go on from
        the cache if there is one. A row of padding only is a filler: it generates nothing.
      target_ids, target_positions: the beginning of an encoder-decoder's target, as a rule one start token a row.
      max_new_tokens: tokens to generate; prompt and new tokens together must fit the config's max_len.
      sampler: transform of logits, see `sampling`; the token is drawn from what it leaves.
      key: typed key of the draws; not needed where the sampler is greedy.
      eos_id: the token, or tokens, that end a row; one in the prompt ends nothing.
      stop: runs of tokens that end a row once its new tokens end with one of them; they are kept.
      pad_id: stands after the end; None: the (first) end token.
      num_samples: rows that continue each prompt, which is run once; the rows of a prompt follow each other.
      cache_kind: key of `cache.KINDS`.
      cache: of earlier turns, with room for the prompt and the new tokens; it is not changed. Its model is a decoder.
        Transforms see the text from this prompt on.
      loop: key of `decoding.LOOPS`; scan takes every step, so that there is a gradient, and while ends with the last
        row.

    Raises:
      ValueError: before anything is traced, for ids or end tokens outside of the vocabulary, prompt and new tokens over
        max_len or the cache's capacity, positions that do not fit, a target where there is none, or a missing key.
      KeyError: an unknown kind of cache or of loop.
    """
    if loop not in LOOPS:
        raise KeyError(f"loop={loop!r} is unknown; choose one of {list(LOOPS)}")
    if type(num_samples) is not int or num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be an integer of at least 1")
    prompt = make_prompt(model, ids, positions, target_ids, target_positions, cache)
    check_room(model, prompt, max_new_tokens, cache_kind, cache)
    choice = _choice(vocab_size_of(model), sampler, key, eos_id, stop, pad_id)
    how: dict[str, Any] = {"new": max_new_tokens, "cache_kind": cache_kind, "num_samples": num_samples, "loop": loop}
    state, (tokens, logprobs, live) = run(model, params, prompt, choice, cache, **how)
    return Generation(tokens, live.sum(axis=1), logprobs, None if cache is None else state.cache)


def stream(
    model: Generator,
    params: Any,
    ids: Ids,
    *,
    positions: Ids | None = None,
    target_ids: TargetIds | None = None,
    target_positions: TargetIds | None = None,
    max_new_tokens: int,
    sampler: sampling.Transform = sampling.greedy,
    key: Key[Array, ""] | None = None,
    eos_id: int | Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] = (),
    pad_id: int | None = None,
    cache_kind: str = "dense",
) -> Iterator[np.ndarray]:
    """Yields the tokens [B] of `generate`, each as soon as it is known; ends early when every row has ended."""
    prompt = make_prompt(model, ids, positions, target_ids, target_positions, None)
    check_room(model, prompt, max_new_tokens, cache_kind, None)
    choice = _choice(vocab_size_of(model), sampler, key, eos_id, stop, pad_id)
    state = prefill(model, params, prompt, choice, new=max_new_tokens, cache_kind=cache_kind, num_samples=1)
    # A generator of its own: what is wrong with the arguments is raised by the call and not by the first token.
    return _tokens(model, params, state, choice, max_new_tokens)


def _tokens(model: Generator, params: Any, state: State, choice: Choice, max_new_tokens: int) -> Iterator[np.ndarray]:
    for left in reversed(range(max_new_tokens)):
        yield np.asarray(state.token)
        if left == 0 or np.asarray(state.ended(choice)).all():
            return
        state, _ = decode(model, params, state, choice, steps=1)


def _choice(vocab_size: int, sampler: Any, key: Any, eos_id: Any, stop: Any, pad_id: int | None) -> Choice:
    eos_ids, pad_id = check_tokens(vocab_size, eos_id, pad_id, stop)
    longest = max(map(len, stop), default=0)
    stops = [[-1] * (longest - len(tokens)) + list(tokens) for tokens in stop]
    return Choice(
        sampling.as_pytree(sampler),
        check_key(sampler, key),
        jnp.asarray(eos_ids, jnp.int32),
        jnp.asarray(stops, jnp.int32) if stops else None,
        jnp.asarray(pad_id, jnp.int32),
    )

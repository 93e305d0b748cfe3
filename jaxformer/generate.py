"""Continuing texts: what is asked for is checked here, before anything is traced, and run by `decoding`.

Prompts of unequal length share a batch by their positions: -1 is padding, on either side, and the first real token of a
row stands at position 0.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from jaxformer import sampling
from jaxformer.cache import KINDS, Cache
from jaxformer.decoding import LOOPS, Choice, Generator, Prompt, State, decode, prefill, run
from jaxformer.embeddings import check_ids, check_positions
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.trees import Leaf

Ids = Int[Array | np.ndarray, "B P"]
TargetIds = Int[Array | np.ndarray, "b T"]


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
    prompt = _prompt(model, ids, positions, target_ids, target_positions, cache)
    _check_room(model, prompt, max_new_tokens, cache_kind, cache)
    choice = _choice(_vocab_size(model), sampler, key, eos_id, stop, pad_id)
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
    prompt = _prompt(model, ids, positions, target_ids, target_positions, None)
    _check_room(model, prompt, max_new_tokens, cache_kind, None)
    choice = _choice(_vocab_size(model), sampler, key, eos_id, stop, pad_id)
    state = prefill(model, params, prompt, choice, new=max_new_tokens, cache_kind=cache_kind, num_samples=1)
    # A generator of its own: what is wrong with the arguments is raised by the call and not by the first token.
    return _tokens(model, params, state, choice, max_new_tokens)


def _tokens(model: Generator, params: Any, state: State, choice: Choice, max_new_tokens: int) -> Iterator[np.ndarray]:
    for left in reversed(range(max_new_tokens)):
        yield np.asarray(state.token)
        if left == 0 or np.asarray(state.ended(choice)).all():
            return
        state, _ = decode(model, params, state, choice, steps=1)


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, multiple: int = 1, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Puts prompts of unequal length into one batch: ids and positions [B P], with padding on the left.

    Args:
      multiple: P is the next multiple of it, so that prompts of similar length share one compiled program.

    Raises:
      ValueError: no prompts, or an empty one.
    """
    if not prompts or min(map(len, prompts)) < 1 or multiple < 1:
        raise ValueError("there must be a prompt, each of at least one token, and multiple must be at least 1")
    width = -(-max(map(len, prompts)) // multiple) * multiple
    ids, positions = np.full((len(prompts), width), pad_id, np.int32), np.full((len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        positions[row, width - len(prompt) :] = np.arange(len(prompt))
    return ids, positions


# Checks ---------------------------------------------------------------------------------------------------------------


def _vocab_size(model: Generator) -> int:
    """Returns the number of ids of the tokens that are generated."""
    return model.config.of_decoder.vocab_size


def _prompt(
    model: Generator, ids: Any, positions: Any, target_ids: Any, target_positions: Any, cache: Cache | None
) -> Prompt:
    if isinstance(model, EncoderDecoder):
        if target_ids is None or cache is not None:
            raise ValueError(
                "an encoder-decoder continues target_ids, as a rule one start token a row, [batch, 1], without a cache "
                "of earlier turns; give target_ids"
            )
        source = _text(ids, positions, model.config.vocab_size)
        prompt = _text(target_ids, target_positions, _vocab_size(model))
        if source[0].shape[0] != prompt[0].shape[0]:
            raise ValueError(f"there are {source[0].shape[0]} sources and {prompt[0].shape[0]} targets; one is of one")
        return Prompt(*prompt, *source)
    if target_ids is not None or target_positions is not None:
        raise ValueError("only an encoder-decoder has a target; give the prompt as ids and positions")
    start = None
    if cache is not None:
        if cache.positions.shape[0] != ids.shape[0]:
            raise ValueError(f"the cache has {cache.positions.shape[0]} rows and ids have {ids.shape[0]}")
        start = cache.positions.max(axis=1, keepdims=True) + 1
    return Prompt(*_text(ids, positions, model.config.vocab_size, start))


def _text(ids: Any, positions: Any, vocab_size: int, start: Array | None = None) -> tuple[Any, Array]:
    """Returns ids and positions of a text that goes on at `start` [B 1], or begins."""
    # Checked before JAX sees them: it cuts 64 bits down to 32 in silence.
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    check_ids(ids, vocab_size)
    if positions is None:
        index = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return ids, index if start is None else start + index
    positions = jnp.asarray(positions)
    if positions.shape != ids.shape or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(
            f"positions are {positions.dtype}{list(positions.shape)}; they must be integers of ids' shape "
            f"{list(ids.shape)}, with -1 for padding"
        )
    if not isinstance(positions, jax.core.Tracer) and int(positions.min()) < -1:
        raise ValueError(f"position {int(positions.min())} is below -1; positions count from 0, and -1 is padding")
    return ids, positions


def _check_room(model: Generator, prompt: Prompt, new: Any, cache_kind: str, cache: Cache | None) -> None:
    if type(new) is not int or new < 1:
        raise ValueError(f"max_new_tokens={new} must be an integer of at least 1")
    if cache_kind not in KINDS:
        raise KeyError(f"cache kind {cache_kind!r} is unknown; choose one of {list(KINDS)}")
    length, most = prompt.ids.shape[1], model.config.max_len
    if length + new > most:
        raise ValueError(
            f"a prompt of {length} and {new} new tokens are {length + new}, over the context of max_len={most}; "
            "shorten the prompt or ask for fewer tokens"
        )
    if cache is not None and not cache.is_ring and not isinstance(cache.length, jax.core.Tracer):
        # The last token is chosen and not read.
        needed = int(cache.length) + length + new - 1
        if needed > cache.capacity:
            raise ValueError(
                f"the cache holds {int(cache.length)} tokens; a prompt of {length} and {new} new tokens need "
                f"{needed} slots, over its capacity of {cache.capacity}; make it larger with init_cache"
            )
    if model.config.positions == "learned":
        check_positions(prompt.positions + new, most)
        if prompt.source_positions is not None:
            check_positions(prompt.source_positions, most)


def _choice(vocab_size: int, sampler: Any, key: Any, eos_id: Any, stop: Any, pad_id: int | None) -> Choice:
    eos_ids = [] if eos_id is None else np.ravel(eos_id).tolist()
    pad_id = (eos_ids or [0])[0] if pad_id is None else pad_id
    named = [*(("eos_id", token) for token in eos_ids), ("pad_id", pad_id)]
    for name, token in [*named, *(("stop", token) for tokens in stop for token in tokens)]:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ValueError(f"{name}={token} is outside of the vocabulary of {vocab_size}")
    if not all(len(tokens) for tokens in stop):
        raise ValueError(f"stop={stop} holds an empty run, which every text ends with")
    if key is None and sampling.needs_key(sampler):
        raise ValueError(f"{sampler} needs a key; pass key=jax.random.key(seed), or sampler=sampling.greedy")
    if key is not None and not (jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key) and key.ndim == 0):
        raise ValueError(
            f"key is {jnp.result_type(key)}{list(jnp.shape(key))}; pass one typed key, jax.random.key(seed)"
        )
    longest = max(map(len, stop), default=0)
    stops = [[-1] * (longest - len(tokens)) + list(tokens) for tokens in stop]
    return Choice(
        sampling.as_pytree(sampler),
        jax.random.key(0) if key is None else key,
        jnp.asarray(eos_ids, jnp.int32),
        jnp.asarray(stops, jnp.int32) if stops else None,
        jnp.asarray(pad_id, jnp.int32),
    )

"""Beam search: the continuations of highest probability that can be found with a few of them at a time.

    score(y) = log p(y | x) / |y|^a                            (Sutskever et al. 2014; Wu et al. 2016, section 7)

Each step ranks all one-token extensions of K unfinished texts by probability. Those that end and are among the first K
join the finished texts, of which the K best by score are kept. The first K that do not end go on, each with the cache
rows of the text that it extends.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer import sampling
from jaxformer.cache import Cache, take_rows
from jaxformer.decoding import Generator, Prompt, cache_for, read_prompt, read_token
from jaxformer.history import History
from jaxformer.prompts import Ids, TargetIds, check_room, check_tokens, make_prompt, vocab_size_of
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["ids", "lengths", "logprobs", "scores"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Beams:
    """The n best texts of each prompt, best first.

    Attributes:
      ids: [B n new] int32, the new tokens only; the end token is kept and padding follows it.
      lengths: [B n] int32, tokens of each text, the end among them; 0 where there is no text.
      logprobs: [B n] float32, log-probability of the whole new text.
      scores: [B n] float32, by which they are ranked; -inf where there is no text.
    """

    ids: Leaf
    lengths: Leaf
    logprobs: Leaf
    scores: Leaf


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["transform", "eos_ids", "pad_id", "length_penalty", "early_stopping"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _Search:
    """What is searched for; leaves of the program, so that new values recompile nothing."""

    transform: Leaf
    eos_ids: Leaf
    pad_id: Leaf
    length_penalty: Leaf
    early_stopping: Leaf

    def score(self, logprobs: Array, length: Array) -> Array:
        return logprobs / jnp.asarray(length, jnp.float32) ** self.length_penalty


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "history", "position", "logprobs", "best", "step"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _State:
    """Between two tokens: rows b K .. b K + K-1 are the unfinished texts of prompt b.

    `position` [B K] is that of the newest token, which is not in the cache yet; `logprobs` [B K] are -inf where there
    is no unfinished text; `best` are the finished texts.
    """

    cache: Cache
    history: History
    position: Leaf
    logprobs: Leaf
    best: Beams
    step: Leaf


def beam_search(
    model: Generator,
    params: Any,
    ids: Ids,
    *,
    positions: Ids | None = None,
    target_ids: TargetIds | None = None,
    target_positions: TargetIds | None = None,
    max_new_tokens: int,
    num_beams: int,
    num_texts: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    transform: sampling.Transform | None = None,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    cache_kind: str = "dense",
) -> Beams:
    """Finds likely continuations of each row of a batch of prompts.

    Args:
      ids, positions, target_ids, target_positions, max_new_tokens, eos_id, pad_id, cache_kind: as of `generate`. Texts
        that reach max_new_tokens without an end are ranked with the others.
      num_beams: unfinished texts of a prompt, and finished ones, that are kept; with 1 the search is greedy.
      num_texts: how many are returned, at most num_beams.
      length_penalty: the exponent a; 0 ranks by probability, which favours short texts, and 1 by the mean over tokens.
      early_stopping: end a prompt's search when num_beams texts have ended. False: when no unfinished text can become
        better than the worst of those, whatever follows.
      transform: of log-probabilities before the search, such as `sampling.no_repeat_ngram`; what it rules out stays
        out, and the probabilities of the rest are not made to sum to 1 again. None: nothing is changed.

    Raises:
      ValueError, KeyError: as `generate`, and for numbers of beams or texts that cannot be.
    """
    if type(num_beams) is not int or num_beams < 1:
        raise ValueError(f"num_beams={num_beams!r} must be an integer of at least 1")
    if type(num_texts) is not int or not 1 <= num_texts <= num_beams:
        raise ValueError(f"num_texts={num_texts!r} must be an integer from 1 to num_beams={num_beams}")
    prompt = make_prompt(model, ids, positions, target_ids, target_positions)
    check_room(model, prompt, max_new_tokens, cache_kind)
    eos_ids, pad_id = check_tokens(vocab_size_of(model), eos_id, pad_id)
    search = _Search(
        None if transform is None else sampling.as_pytree(transform),
        jnp.asarray(eos_ids, jnp.int32),
        jnp.asarray(pad_id, jnp.int32),
        jnp.asarray(length_penalty, jnp.float32),
        jnp.asarray(early_stopping),
    )
    best = _run(model, params, prompt, search, new=max_new_tokens, num_beams=num_beams, cache_kind=cache_kind)
    return jax.tree.map(lambda leaf: leaf[:, :num_texts], best)


@partial(jax.jit, static_argnames=("model", "new", "num_beams", "cache_kind"))
def _run(
    model: Generator, params: Any, prompt: Prompt, search: _Search, *, new: int, num_beams: int, cache_kind: str
) -> Beams:
    (B, P), K = prompt.ids.shape, num_beams
    logits, cache = read_prompt(model, params, prompt, cache_for(model, prompt, P + new, cache_kind))
    rows = jnp.repeat(jnp.arange(B), K)
    history = History.of_prompt(prompt.ids, prompt.positions, P + new)
    history = jax.tree.map(lambda leaf: leaf[rows], history)
    position = prompt.positions.max(axis=1)
    # All texts of a prompt begin as the same one, of which one copy is enough; a filler has none.
    alone = (jnp.arange(K) == 0) & (position >= 0)[:, None]
    nothing = jnp.full((B, K), -jnp.inf)
    best = Beams(jnp.full((B, K, new), search.pad_id), jnp.zeros((B, K), jnp.int32), nothing, nothing)
    start = jnp.where(alone, 0.0, nothing)
    state = _State(take_rows(cache, rows), history, position[rows], start, best, jnp.zeros((), jnp.int32))
    state = _extend(search, new, state, logits[rows])

    def goes_on(state: _State) -> Array:
        return (state.step < new) & (state.logprobs > -jnp.inf).any()

    def body(state: _State) -> _State:
        # Rows without a text write empty slots.
        live = state.logprobs.reshape(-1) > -jnp.inf
        position = jnp.where(live, state.position, -1)
        logits, cache = read_token(model, params, state.history.newest(), position, state.cache)
        return _extend(search, new, dataclasses.replace(state, cache=cache), logits)

    state = jax.lax.while_loop(goes_on, body, state)
    # What has not ended is a text too.
    texts = state.history.new_ids(new, search.pad_id).reshape(B, K, new)
    return _merged(state.best, _beams(search, texts, state.logprobs, state.step))


def _extend(search: _Search, new: int, state: _State, logits: Float[Array, "R V"]) -> _State:
    """Extends the unfinished texts by one token each, of which the logits are given."""
    B, K = state.logprobs.shape
    V = logits.shape[-1]
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    if search.transform is not None:
        logprobs = search.transform(logprobs, state.history)
    totals = (state.logprobs[:, :, None] + logprobs.reshape(B, K, V)).reshape(B, K * V)
    totals = jnp.where(jnp.isnan(totals), -jnp.inf, totals)
    # So many, since each of K texts may end with each of the end tokens: K others are left even so.
    totals, place = jax.lax.top_k(totals, min(K * (1 + search.eos_ids.size), K * V))
    parent, token = jnp.arange(B)[:, None] * K + place // V, (place % V).astype(jnp.int32)
    ends, step = jnp.isin(token, search.eos_ids), state.step + 1

    texts = state.history.new_ids(new, search.pad_id)[parent].at[:, :, state.step].set(token)
    ended = jnp.where(ends & (jnp.arange(totals.shape[1]) < K), totals, -jnp.inf)
    best = _merged(state.best, _beams(search, texts, ended, step))

    totals, chosen = jax.lax.top_k(jnp.where(ends, -jnp.inf, totals), K)
    rows, token = (jnp.take_along_axis(x, chosen, axis=1).reshape(-1) for x in (parent, token))
    history = jax.tree.map(lambda leaf: leaf[rows], state.history)
    history = history.append(token, totals.reshape(-1) == -jnp.inf)
    state = _State(_taken(state.cache, rows), history, state.position[rows] + 1, totals, best, step)
    totals = jnp.where(_is_over(search, new, state)[:, None], -jnp.inf, totals)
    return dataclasses.replace(state, logprobs=totals)


def _is_over(search: _Search, new: int, state: _State) -> Bool[Array, " B"]:
    """Returns the prompts that no more tokens can improve.

    They only lower a log-probability, so that no score is above that of the present sum at the best length.
    """
    worst, longest = state.best.scores[:, -1], jnp.where(search.length_penalty < 0, state.step + 1, new)
    is_full = worst > -jnp.inf
    hopeless = search.score(state.logprobs.max(axis=1), longest) <= worst
    return is_full & (hopeless | search.early_stopping)


def _beams(search: _Search, texts: Array, logprobs: Array, length: Array) -> Beams:
    """Returns texts [B n new] of one length as finished ones."""
    lengths = jnp.where(logprobs > -jnp.inf, length, 0)
    return Beams(texts, lengths, logprobs, search.score(logprobs, length))


def _merged(best: Beams, more: Beams) -> Beams:
    """Returns the best of both, as many as there were."""
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), best, more)
    _, kept = jax.lax.top_k(both.scores, best.scores.shape[1])
    rows = jnp.arange(kept.shape[0])[:, None]
    return jax.tree.map(lambda leaf: leaf[rows, kept], both)


def _taken(cache: Cache, rows: Int[Array, " R"]) -> Cache:
    """Returns the cache of these rows; all texts of a prompt have one source, which stays where it is."""
    taken = take_rows(cache, rows)
    layers = dataclasses.replace(taken.layers, cross_kv=cache.layers.cross_kv)
    return dataclasses.replace(taken, layers=layers)

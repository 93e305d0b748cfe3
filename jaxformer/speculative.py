"""Speculative decoding: several tokens are guessed cheaply, and the model reads all of them at once.

    guess x ~ q;  keep it with probability min(1, p(x) / q(x));  draw the first that is not kept anew ~ max(0, p - q)

What is written has exactly the distribution p of the model alone, whatever guesses (Leviathan et al. 2023, "Fast
inference from Transformers via speculative decoding", algorithm 1): guesses that are right only save passes.

The rows of a batch keep different numbers of guesses. The caches hold those that were not kept as empty slots, up to
the end of the row that kept most.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxformer import sampling
from jaxformer.cache import Cache, keep
from jaxformer.decoding import Choice, Generator, Prompt, cache_for, read_prompt, read_token, read_tokens
from jaxformer.history import History
from jaxformer.prompts import Ids, TargetIds, check_key, check_room, check_tokens, make_prompt, vocab_size_of
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["model"])
@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Guesses by a smaller model with the same token ids."""

    model: Generator
    params: Any

    def begin(self, prompt: Prompt, capacity: int, cache_kind: str) -> Cache:
        """Returns what it knows after the prompt."""
        return read_prompt(self.model, self.params, prompt, cache_for(self.model, prompt, capacity, cache_kind))[1]

    def guess(self, cache: Cache, transform: Any, key: Array, history: History, positions: Array) -> Any:
        """Returns guesses [B g], their probabilities [B g V], and the cache with all that it has read.

        Args:
          positions: [B g+1] of the newest token and the guesses; -1 for what is not to be read.
        """

        def one(carry: tuple[Cache, History, Array], at: tuple[Array, Array]) -> Any:
            cache, history, token = carry
            step, position = at
            logits, cache = read_token(self.model, self.params, token, position, cache)
            left = transform(logits, history)
            token = sampling.draw(jax.random.fold_in(key, step), left)
            return (cache, history.append(token, position < 0), token), (token, jax.nn.softmax(left))

        steps = jnp.arange(positions.shape[1])
        (cache, _, _), (tokens, q) = jax.lax.scan(one, (cache, history, history.newest()), (steps, positions.T))
        # The last guess is only read, so that the cache holds it in case all are kept.
        return tokens[:-1].T, jnp.moveaxis(q[:-1], 0, 1), cache


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["ngram"])
@dataclasses.dataclass(frozen=True)
class PromptLookUp:
    """Guesses that the text goes on as it did after the same `ngram` tokens before (Saxena 2023, prompt lookup)."""

    ngram: int = 2

    def begin(self, prompt: Prompt, capacity: int, cache_kind: str) -> None:
        """Returns nothing: the text so far is all it knows."""

    def guess(self, cache: None, transform: Any, key: Array, history: History, positions: Array) -> Any:
        """Returns guesses [B g], their probabilities [B g V] of which each is 1, and nothing; see `DraftModel`."""
        ids, place = history.ids, jnp.arange(history.ids.shape[1])
        n, g = self.ngram, positions.shape[1] - 1
        tail = jnp.take_along_axis(ids, jnp.maximum(history.lengths[:, None] - n + jnp.arange(n), 0), axis=1)
        # Column c of `same` says whether the n tokens before it are those at the end.
        before = jnp.stack([jnp.roll(ids, n - i, axis=1) for i in range(n)], axis=2)
        same = (before == tail[:, None]).all(axis=2) & (place >= n) & (place < history.lengths[:, None])
        start = jnp.where(same, place, 0).max(axis=1)
        guesses = jnp.take_along_axis(ids, jnp.minimum(start[:, None] + jnp.arange(g), ids.shape[1] - 1), axis=1)
        return jnp.maximum(guesses, 0), None, None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "lengths", "logprobs", "guessed", "kept"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Speculation:
    """What was written.

    Attributes:
      ids, lengths, logprobs: as of `Generation`.
      guessed: [B] int32, tokens that were guessed.
      kept: [B] int32, those of them that were kept; kept / guessed is the acceptance rate.
    """

    ids: Leaf
    lengths: Leaf
    logprobs: Leaf
    guessed: Leaf
    kept: Leaf


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "draft", "history", "position", "logprobs", "guessed", "kept", "done", "round"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _State:
    """Between two rounds: the newest token of each row, at `position` [B], is in the history and in no cache yet."""

    cache: Cache
    draft: Any
    history: History
    position: Leaf
    logprobs: Leaf
    guessed: Leaf
    kept: Leaf
    done: Leaf
    round: Leaf


def speculate(
    model: Generator,
    params: Any,
    ids: Ids,
    *,
    draft: DraftModel | PromptLookUp,
    guesses: int = 4,
    positions: Ids | None = None,
    target_ids: TargetIds | None = None,
    target_positions: TargetIds | None = None,
    max_new_tokens: int,
    sampler: sampling.Transform = sampling.greedy,
    key: Key[Array, ""] | None = None,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    cache_kind: str = "dense",
) -> Speculation:
    """Continues each row of a batch of prompts, as `generate` does, with fewer passes of the model.

    Greedy tokens are those of `generate`; drawn ones have its distribution, and are others for the same key.

    Args:
      draft: what guesses.
      guesses: tokens that are guessed in each round.
      sampler: transform of the logits of model and draft.
      cache_kind: of both; a ring cannot forget and is refused.
      ids and the others: as of `generate`.

    Raises:
      ValueError, KeyError: as `generate`, and for a draft of another vocabulary or kind.
    """
    prompt = make_prompt(model, ids, positions, target_ids, target_positions)
    check_room(model, prompt, max_new_tokens, cache_kind)
    _check_draft(model, draft, prompt, max_new_tokens, cache_kind)
    if type(guesses) is not int or guesses < 1:
        raise ValueError(f"guesses={guesses!r} must be an integer of at least 1")
    eos_ids, pad_id = check_tokens(vocab_size_of(model), eos_id, pad_id)
    choice = Choice(
        sampling.as_pytree(sampler),
        check_key(sampler, key),
        jnp.asarray(eos_ids, jnp.int32),
        None,
        jnp.asarray(pad_id, jnp.int32),
    )
    how: dict[str, Any] = {"new": max_new_tokens, "guesses": guesses, "cache_kind": cache_kind}
    return _run(model, params, draft, prompt, choice, **how)


def _check_draft(model: Generator, draft: Any, prompt: Prompt, new: int, cache_kind: str) -> None:
    if "ring" in cache_kind:
        raise ValueError(f"cache_kind={cache_kind!r} has overwritten what a round must forget; use dense or int8")
    if isinstance(draft, PromptLookUp):
        if type(draft.ngram) is not int or draft.ngram < 1:
            raise ValueError(f"ngram={draft.ngram!r} must be an integer of at least 1")
        return
    theirs, ours = draft.model.config, model.config
    for name in ("vocab_size", "target_vocab_size", "architecture"):
        if getattr(theirs, name) != getattr(ours, name):
            raise ValueError(
                f"the draft has {name}={getattr(theirs, name)!r} and the model {getattr(ours, name)!r}; their texts "
                "must be of the same tokens"
            )
    check_room(draft.model, prompt, new, cache_kind)


@partial(jax.jit, static_argnames=("model", "new", "guesses", "cache_kind"))
def _run(
    model: Generator,
    params: Any,
    draft: Any,
    prompt: Prompt,
    choice: Choice,
    *,
    new: int,
    guesses: int,
    cache_kind: str,
) -> Speculation:
    B, P = prompt.ids.shape
    # In each round the line grows by what the row keeps that keeps most, and by all guesses before they are judged.
    capacity = P + new * min(B, guesses + 1) + guesses + 1
    logits, cache = read_prompt(model, params, prompt, cache_for(model, prompt, capacity, cache_kind))
    history = History.of_prompt(prompt.ids, prompt.positions, P + new + guesses + 1)
    position, zeros = prompt.positions.max(axis=1) + 1, jnp.zeros(B, jnp.int32)
    done, step = position == 0, jnp.zeros((), jnp.int32)
    token, logprob = choice(logits, history, done, step)
    logprobs = jnp.zeros((B, new)).at[:, 0].set(logprob)
    history = history.append(token, done)
    state = _State(
        cache, draft.begin(prompt, capacity, cache_kind), history, position, logprobs, zeros, zeros, done, step
    )
    state = dataclasses.replace(state, done=_ended(state, choice, new))
    state = jax.lax.while_loop(
        lambda state: ~state.done.all(), partial(_round, model, params, draft, choice, new, guesses), state
    )
    lengths = state.history.lengths - state.history.prompt_lengths
    return Speculation(state.history.new_ids(new, choice.pad_id), lengths, state.logprobs, state.guessed, state.kept)


def _ended(state: _State, choice: Choice, new: int) -> Array:
    written = state.history.lengths - state.history.prompt_lengths
    return state.done | (written >= new) | jnp.isin(state.history.newest(), choice.eos_ids)


def _round(model: Generator, params: Any, draft: Any, choice: Choice, new: int, g: int, state: _State) -> _State:
    """Guesses g tokens, reads them, keeps the first ones, and adds one more: from 1 to g + 1 new tokens a row."""
    live, key = ~state.done, jax.random.fold_in(choice.key, state.round + 1)
    keys = [jax.random.fold_in(key, i) for i in range(3)]
    last = state.history.prompt_lengths + new - 1
    positions = state.position[:, None] + jnp.arange(g + 1)
    positions = jnp.where(live[:, None] & (positions <= last[:, None]), positions, -1)
    guesses, q, drafted = draft.guess(state.draft, choice.transform, keys[0], state.history, positions)

    read = jnp.concatenate([state.history.newest()[:, None], guesses], axis=1)
    logits, cache = read_tokens(model, params, read, positions, state.cache)
    left = _transformed(choice.transform, logits, state.history, guesses)
    kept, token = _judged(keys[1:], jax.nn.softmax(left), guesses, q)

    tokens = jnp.where(jnp.arange(g + 1) < kept[:, None], jnp.pad(guesses, ((0, 0), (0, 1))), token[:, None])
    written = state.history.lengths - state.history.prompt_lengths
    count = jnp.minimum(kept + 1, new - written)
    ends = jnp.isin(tokens, choice.eos_ids)
    count = jnp.where(live, jnp.minimum(count, jnp.where(ends.any(axis=1), ends.argmax(axis=1) + 1, g + 1)), 0)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, :, None], axis=2)[:, :, 0]
    logprob = jnp.where(jnp.isnan(left).any(axis=2), jnp.nan, logprob)

    place = jnp.where(jnp.arange(g + 1) < count[:, None], written[:, None] + jnp.arange(g + 1), new)
    state = _State(
        keep(cache, state.cache.length, count),
        None if drafted is None else keep(drafted, state.draft.length, count),
        state.history.extend(tokens, count),
        state.position + count,
        state.logprobs.at[jnp.arange(place.shape[0])[:, None], place].set(logprob, mode="drop"),
        state.guessed + g * live,
        state.kept + jnp.where(live, jnp.minimum(kept, count), 0),
        state.done,
        state.round + 1,
    )
    return dataclasses.replace(state, done=_ended(state, choice, new))


def _transformed(transform: Any, logits: Float[Array, "B T V"], history: History, guesses: Array) -> Array:
    """Returns the logits after each token as the transform leaves them, which sees the text up to there."""
    texts = [history.extend(guesses, jnp.full(guesses.shape[:1], i)) for i in range(logits.shape[1])]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *texts)
    return jax.vmap(transform, in_axes=1, out_axes=1)(logits, stacked)


def _judged(
    keys: Sequence[Array], p: Float[Array, "B T V"], guesses: Int[Array, "B g"], q: Float[Array, "B g V"] | None
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Returns how many guesses are kept and the token after them; q is None where each guess had probability 1."""
    if q is None:
        q = jax.nn.one_hot(guesses, p.shape[-1])
    at = guesses[:, :, None]
    ratio = jnp.take_along_axis(p[:, :-1], at, axis=2)[:, :, 0] / jnp.take_along_axis(q, at, axis=2)[:, :, 0]
    rows = jax.vmap(lambda row: jax.random.fold_in(keys[0], row))(jnp.arange(p.shape[0]))
    luck = jax.vmap(lambda key: jax.random.uniform(key, guesses.shape[1:]))(rows)
    kept = jnp.cumprod(luck < ratio, axis=1).sum(axis=1)
    # After the last guess there is none to be wrong: there q is 0.
    gap = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)
    gap, p = (jnp.take_along_axis(x, kept[:, None, None], axis=1)[:, 0] for x in (gap, p))
    gap = jnp.where(gap.sum(axis=1, keepdims=True) > 0, gap, p)  # of equal distributions rounding alone refuses a guess
    return kept, sampling.draw(keys[1], jnp.log(gap))

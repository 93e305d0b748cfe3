"""Prompts as the programs of decoding take them, and the checks of what is asked, all before anything is traced.

Prompts of unequal length share a batch by their positions: -1 is padding, on either side, and the first real token of a
row stands at position 0.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxformer import sampling
from jaxformer.cache import KINDS, Cache
from jaxformer.decoding import Generator, Prompt
from jaxformer.embeddings import check_ids, check_positions
from jaxformer.encoder_decoder import EncoderDecoder

Ids = Int[Array | np.ndarray, "B P"]
TargetIds = Int[Array | np.ndarray, "b T"]


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


def vocab_size_of(model: Generator) -> int:
    """Returns the number of ids of the tokens that are generated."""
    return model.config.of_decoder.vocab_size


def make_prompt(
    model: Generator, ids: Any, positions: Any, target_ids: Any, target_positions: Any, cache: Cache | None = None
) -> Prompt:
    """Returns the prompt that the arguments of `generate` say.

    Raises:
      ValueError: ids or positions that do not fit each other or the model, or a target where there is none.
    """
    if isinstance(model, EncoderDecoder):
        if target_ids is None or cache is not None:
            raise ValueError(
                "an encoder-decoder continues target_ids, as a rule one start token a row, [batch, 1], without a cache "
                "of earlier turns; give target_ids"
            )
        source = _text(ids, positions, model.config.vocab_size)
        prompt = _text(target_ids, target_positions, vocab_size_of(model))
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


def check_room(model: Generator, prompt: Prompt, new: Any, cache_kind: str, cache: Cache | None = None) -> None:
    """Refuses more tokens than the model or the cache can hold, and an unknown kind of cache.

    Raises:
      ValueError, KeyError: see above.
    """
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


def check_tokens(
    vocab_size: int, eos_id: Any, pad_id: int | None, stop: Sequence[Sequence[int]] = ()
) -> tuple[list[int], int]:
    """Returns the end tokens as a list, and the padding: the first of them unless it is given.

    Raises:
      ValueError: a token that is outside of the vocabulary, or an empty run of tokens to stop at.
    """
    eos_ids = [] if eos_id is None else np.ravel(eos_id).tolist()
    pad_id = (eos_ids or [0])[0] if pad_id is None else pad_id
    named = [*(("eos_id", token) for token in eos_ids), ("pad_id", pad_id)]
    for name, token in [*named, *(("stop", token) for tokens in stop for token in tokens)]:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ValueError(f"{name}={token} is outside of the vocabulary of {vocab_size}")
    if not all(len(tokens) for tokens in stop):
        raise ValueError(f"stop={stop} holds an empty run, which every text ends with")
    return eos_ids, pad_id


def check_key(sampler: Any, key: Any) -> Any:
    """Returns the key of the draws, or any if nothing is left to chance.

    Raises:
      ValueError: no key where there are draws, or what is not one typed key.
    """
    if key is None and sampling.needs_key(sampler):
        raise ValueError(f"{sampler} needs a key; pass key=jax.random.key(seed), or sampler=sampling.greedy")
    if key is not None and not (jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key) and key.ndim == 0):
        raise ValueError(
            f"key is {jnp.result_type(key)}{list(jnp.shape(key))}; pass one typed key, jax.random.key(seed)"
        )
    return jax.random.key(0) if key is None else key

"""Texts with something missing, and what is to be put back: pure functions of a generator and token ids.

    mask_tokens      a [M] c d      ->  b at its place             (Devlin et al. 2019, section 3.1)
    corrupt_spans    a <0> d <1>    ->  <0> b c <1> e              (Raffel et al. 2020, section 3.1.4)
    infill           a [M] d        ->  a b c d                    (Lewis et al. 2020, section 2.2)
    permute          d e . a b c .  ->  a b c . d e .              (the same)

Give each row a generator of its own, as grain's `random_map` does: a batch then follows from seed and number alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

Ids = Int[np.ndarray, " T"]


class Masked(NamedTuple):
    """Ids [T] in which some are hidden, and which ones [T] are to be found."""

    ids: np.ndarray
    chosen: np.ndarray


def mask_tokens(
    rng: np.random.Generator,
    ids: Ids,
    *,
    mask_id: int,
    vocab_size: int,
    maskable: Bool[np.ndarray, " T"] | None = None,
    word_starts: Bool[np.ndarray, " T"] | None = None,
    rate: float = 0.15,
    masked: float = 0.8,
    random: float = 0.1,
) -> Masked:
    """Chooses a share of the tokens to be found: of these most are masked, some random, and the rest as they are.

    Args:
      maskable: which tokens may be chosen; not padding and special tokens. None: all.
      word_starts: which tokens begin a word; whole words are then chosen, until there are enough tokens. None: single
        tokens, exactly so many.
      rate: share of the maskable tokens that is chosen, at least one of them.
      masked, random: share of the chosen tokens that becomes mask_id, or a token from 0 to vocab_size - 1.

    Raises:
      ValueError: shares that are no shares.
    """
    _check_shares(rate=rate, masked=masked, random=random)
    if masked + random > 1:
        raise ValueError(f"masked={masked} and random={random} are more than all")
    free = np.ones(ids.shape, bool) if maskable is None else maskable
    places = np.flatnonzero(free)
    chosen = np.zeros(ids.shape, bool)
    if not places.size:
        return Masked(ids.copy(), chosen)
    count = max(1, round(rate * places.size))
    if word_starts is None:
        chosen[rng.permutation(places)[:count]] = True
    else:
        word = np.cumsum(word_starts)
        for number in rng.permutation(np.unique(word[places])):
            if chosen.sum() >= count:
                break
            chosen |= free & (word == number)
    draw = rng.random(ids.shape)
    hidden = np.where(draw < masked, mask_id, rng.integers(vocab_size, size=ids.shape))
    return Masked(np.where(chosen & (draw < masked + random), hidden, ids).astype(ids.dtype), chosen)


def corrupt_spans(
    rng: np.random.Generator, ids: Ids, *, sentinels: Sequence[int], rate: float = 0.15, mean_span: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Hides spans of a text: (the text with a sentinel for each, each sentinel followed by what it hides).

    Spans to keep and spans to hide take turns, the first is kept, and all ways to cut the text so are equally likely.
    No end is added to either side.

    Args:
      sentinels: ids of <0>, <1>, ... in the order of their use.
      rate: share of hidden tokens, to rounding; mean_span: their number over that of spans, to rounding.

    Raises:
      ValueError: a text of fewer than 2 tokens, fewer sentinels than spans, or shares and lengths that cannot be.
    """
    hidden, spans = _counts(len(ids), rate, mean_span)
    if len(sentinels) < spans:
        raise ValueError(f"{len(ids)} tokens have {spans} hidden spans, but there are {len(sentinels)} sentinels")
    sizes = np.stack([_parts(rng, len(ids) - hidden, spans), _parts(rng, hidden, spans)], axis=1)
    pieces = np.split(ids, np.cumsum(sizes)[:-1])
    used = [np.array([sentinel], ids.dtype) for sentinel in sentinels[:spans]]
    text = [part for kept, sentinel in zip(pieces[::2], used, strict=True) for part in (kept, sentinel)]
    answer = [part for sentinel, gone in zip(used, pieces[1::2], strict=True) for part in (sentinel, gone)]
    return np.concatenate(text), np.concatenate(answer)


def span_lengths(length: int, *, rate: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """Returns how long a text may be for `corrupt_spans` to leave `length` tokens, and how long its answer is then.

    Both sides have an end token of one more: (568, 114) for 512.

    Raises:
      ValueError: a length below 3, or shares and lengths that cannot be.
    """
    if length < 3:
        raise ValueError(f"length={length} must be at least 3: a token, a sentinel and the end")
    text, answer = 2, 3
    while True:
        hidden, spans = _counts(text, rate, mean_span)
        if text - hidden + spans + 1 > length:
            return text - 1, answer
        text, answer = text + 1, hidden + spans + 1


def _counts(length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Returns how many tokens are hidden, and in how many spans."""
    _check_shares(rate=rate)
    if length < 2 or not mean_span >= 1:
        raise ValueError(f"length={length} must be at least 2 tokens, and mean_span={mean_span} at least 1")
    hidden = min(max(round(length * rate), 1), length - 1)
    return hidden, min(max(round(hidden / mean_span), 1), length - hidden)


def _parts(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """Returns the sizes of `parts` non-empty parts of `total`, every choice of them equally likely."""
    cuts = np.sort(rng.permutation(total - 1)[: parts - 1]) + 1
    return np.diff([0, *cuts, total])


def infill(
    rng: np.random.Generator, ids: Ids, *, mask_id: int, rate: float = 0.3, mean_span: float = 3.0
) -> np.ndarray:
    """Hides a share of the tokens, in spans of Poisson length, each behind one mask; an empty span is a mask too.

    Raises:
      ValueError: a rate that is no share, or a mean of less than half a token.
    """
    _check_shares(rate=rate)
    if not mean_span >= 0.5:
        raise ValueError(f"mean_span={mean_span} must be at least 0.5 tokens")
    spans: list[int] = []
    hidden = round(rate * len(ids))
    while sum(spans) < hidden:
        spans.append(min(int(rng.poisson(mean_span)), hidden - sum(spans)))
    mask, parts, at, kept = np.array([mask_id], ids.dtype), [], 0, 0
    # Each span begins after so many of the kept tokens.
    for after, span in zip(np.sort(rng.integers(len(ids) - hidden + 1, size=len(spans))), spans, strict=True):
        parts += [ids[at : at + after - kept], mask]
        at, kept = at + after - kept + span, after
    return np.concatenate([*parts, ids[at:]])


def permute(rng: np.random.Generator, ids: Ids, *, ends: Sequence[int]) -> np.ndarray:
    """Puts the sentences of a text, which end with one of the ids `ends`, into a random order."""
    cuts = np.flatnonzero(np.isin(ids, np.asarray(ends))) + 1
    sentences = [part for part in np.split(ids, cuts) if part.size]
    return np.concatenate([sentences[i] for i in rng.permutation(len(sentences))]) if sentences else ids.copy()


def _check_shares(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name}={share} must be from 0 to 1")

"""What is hidden in a text, how much of it, and that it can be put back."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.corruption import corrupt_spans, infill, mask_tokens, permute, span_lengths

MASK, V = 99, 50
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def text(length):
    return np.arange(length, dtype=np.int32) % V


# Masked tokens --------------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 60), st.floats(0, 1), st.data())
def test_a_share_of_the_maskable_tokens_is_chosen_and_nothing_else_changes(rng, length, rate, data):
    maskable = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    ids, chosen = mask_tokens(rng, text(length), mask_id=MASK, vocab_size=V, maskable=maskable, rate=rate)
    assert not (chosen & ~maskable).any()
    assert chosen.sum() == (max(1, round(rate * maskable.sum())) if maskable.any() else 0)
    np.testing.assert_array_equal(ids[~chosen], text(length)[~chosen])
    assert ids.dtype == np.int32
    assert all(token == MASK or 0 <= token < V for token in ids)


def test_of_the_chosen_eight_tenths_are_masked_one_is_random_and_one_stays():
    length = 200_000
    ids, chosen = mask_tokens(np.random.default_rng(0), text(length), mask_id=MASK, vocab_size=V)
    before, after = text(length)[chosen], ids[chosen]
    assert chosen.sum() == 0.15 * length
    assert abs((after == MASK).mean() - 0.8) < 0.01
    random = (after != MASK) & (after != before)
    assert abs(random.mean() - 0.1 * (1 - 1 / V)) < 0.01
    counts = np.bincount(after[random], minlength=V)
    assert counts.min() > 0.7 * counts.mean()


@given(seeds, st.lists(st.integers(1, 4), min_size=1, max_size=12), st.floats(0.05, 0.9))
def test_whole_words_are_chosen_or_not_at_all(rng, words, rate):
    starts = np.concatenate([np.arange(size) == 0 for size in words])
    length = sum(words)
    _, chosen = mask_tokens(rng, text(length), mask_id=MASK, vocab_size=V, word_starts=starts, rate=rate)
    groups = [set(chosen[np.cumsum(starts) == number]) for number in range(1, len(words) + 1)]
    assert all(len(group) == 1 for group in groups)
    wanted = max(1, round(rate * length))
    assert wanted <= chosen.sum() < wanted + max(words)


# Spans ----------------------------------------------------------------------------------------------------------------

SENTINELS = [1000 - i for i in range(100)]


@given(seeds, st.integers(2, 120), st.floats(0, 1), st.floats(1, 6))
def test_every_sentinel_stands_for_what_follows_it_in_the_answer(rng, length, rate, mean):
    short, answer = corrupt_spans(rng, text(length), sentinels=SENTINELS, rate=rate, mean_span=mean)
    pieces = collections.defaultdict(list)
    for token in answer:
        if token > V:
            at = token
        pieces[at].append(token)
    back = [t for token in short for t in (pieces[token][1:] if token > V else [token])]
    np.testing.assert_array_equal(back, text(length))
    used = [token for token in short if token > V]
    assert used == SENTINELS[: len(used)] == list(pieces)
    assert all(len(piece) > 1 for piece in pieces.values())
    assert short[0] <= V  # the first span is kept
    hidden = min(max(round(length * rate), 1), length - 1)
    assert len(answer) - len(used) == hidden
    assert len(used) == min(max(round(hidden / mean), 1), length - hidden)
    assert not (np.diff(np.flatnonzero(short > V)) == 1).any()


def test_the_published_lengths():
    """Texts of 568 tokens fill 512 with 114 to be found, as in Raffel et al. 2020."""
    assert span_lengths(512) == (568, 114)
    short, answer = corrupt_spans(np.random.default_rng(0), text(568), sentinels=SENTINELS)
    assert (len(short) + 1, len(answer) + 1) == (512, 114)


@given(st.integers(3, 300), st.floats(0.05, 0.5), st.floats(1, 5))
def test_the_longest_text_fits_and_the_next_does_not(length, rate, mean):
    longest, answer = span_lengths(length, rate=rate, mean_span=mean)
    rng = np.random.default_rng(0)
    many = list(range(10**6, 10**6 + longest))
    short, hidden = corrupt_spans(rng, text(longest), sentinels=many, rate=rate, mean_span=mean)
    assert len(short) + 1 <= length
    assert len(hidden) + 1 == answer
    assert len(corrupt_spans(rng, text(longest + 1), sentinels=[*many, 1], rate=rate, mean_span=mean)[0]) + 1 > length


def test_all_cuts_are_equally_likely():
    rng = np.random.default_rng(0)
    ways = collections.Counter(
        tuple(corrupt_spans(rng, text(6), sentinels=SENTINELS, rate=0.5, mean_span=1.5)[0]) for _ in range(4000)
    )
    assert len(ways) == 4  # 3 = 1 + 2 or 2 + 1, twice
    assert max(ways.values()) - min(ways.values()) < 200


# Denoising ------------------------------------------------------------------------------------------------------------


@given(seeds, st.integers(0, 60), st.floats(0, 1), st.floats(0.5, 6))
def test_infilling_hides_a_share_and_keeps_the_rest_in_order(rng, length, rate, mean):
    short = infill(rng, text(length), mask_id=MASK, rate=rate, mean_span=mean)
    kept = short[short != MASK]
    assert len(kept) == length - round(rate * length)
    rest = iter(text(length))
    assert all(token in rest for token in kept)
    assert (short == MASK).any() == (round(rate * length) > 0)
    assert short.dtype == np.int32


def test_spans_are_of_poisson_length():
    short = infill(np.random.default_rng(0), text(100_000), mask_id=MASK)
    masks = (short == MASK).sum()
    assert abs(30_000 / masks - 3) < 0.1


@given(seeds, st.lists(st.integers(0, 9), max_size=30))
def test_sentences_are_put_in_another_order(rng, ids):
    ids = np.asarray(ids, np.int32)
    mixed = permute(rng, ids, ends=[0])

    def sentences(row):
        return collections.Counter(tuple(part) for part in np.split(row, np.flatnonzero(row == 0) + 1) if part.size)

    if ids.size and ids[-1] == 0:
        assert sentences(mixed) == sentences(ids)
    assert collections.Counter(mixed) == collections.Counter(ids)


def test_every_order_of_sentences_comes():
    rng, ids = np.random.default_rng(0), np.array([1, 0, 2, 0, 3, 0])
    assert len({tuple(permute(rng, ids, ends=[0])) for _ in range(100)}) == 6


# What cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "message"), [
    (lambda r: mask_tokens(r, text(3), mask_id=1, vocab_size=2, rate=1.5), r"rate=1\.5 must be from 0 to 1"),
    (lambda r: mask_tokens(r, text(3), mask_id=1, vocab_size=2, masked=0.9, random=0.2), "are more than all"),
    (lambda r: corrupt_spans(r, text(1), sentinels=[9]), "length=1 must be at least 2"),
    (lambda r: corrupt_spans(r, text(100), sentinels=[9]), "100 tokens have 5 hidden spans, but there are 1 sentinels"),
    (lambda r: corrupt_spans(r, text(9), sentinels=[9], mean_span=0.5), r"mean_span=0\.5 at least 1"),
    (lambda r: span_lengths(2), "length=2 must be at least 3"),
    (lambda r: infill(r, text(9), mask_id=1, mean_span=0.1), r"mean_span=0\.1 must be at least 0\.5"),
    (lambda r: infill(r, text(9), mask_id=1, rate=-0.1), r"rate=-0\.1 must be from 0 to 1"),
])  # fmt: skip
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.random.default_rng(0))

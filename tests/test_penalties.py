"""Transforms that read the text so far, against definitions in plain Python, and the invariants of every transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draw import close
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FLOAT32

from jaxformer.history import History
from jaxformer.sampling import (
    allowed,
    chain,
    frequency_penalty,
    greedy,
    min_new_tokens,
    min_p,
    needs_key,
    no_repeat_ngram,
    presence_penalty,
    repetition_penalty,
    sample,
    temperature,
    top_k,
    top_p,
    typical,
    with_history,
)

V, C = 7, 9
EXAMPLES = 1000


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def transformed(transform, logits, history):
    return transform(logits, history)


def history_of(prompts, texts):
    ids, rows = np.full((len(prompts), C), -1), list(zip(prompts, texts, strict=True))
    for row, (prompt, text) in enumerate(rows):
        ids[row, : len(prompt) + len(text)] = [*prompt, *text]
    lengths = np.array([[len(prompt), len(prompt) + len(text)] for prompt, text in rows])
    return History(jnp.asarray(ids, jnp.int32), *(jnp.asarray(column, jnp.int32) for column in lengths.T))


tokens = st.lists(st.integers(0, V - 1), max_size=4)
texts = st.tuples(tokens.filter(bool), tokens)
floats = st.floats(-20, 20, width=32) | st.sampled_from([0.0, -0.0, -np.inf])
rows_of_logits = st.lists(floats, min_size=V, max_size=V).filter(lambda row: max(row) > -np.inf)
cases = st.tuples(
    st.lists(texts, min_size=2, max_size=2), st.lists(rows_of_logits, min_size=2, max_size=2).map(np.float32)
)


def run(transform, case):
    pairs, logits = case
    return np.asarray(transformed(transform, logits, history_of(*zip(*pairs, strict=True))))


# The history ----------------------------------------------------------------------------------------------------------


@given(st.lists(texts, min_size=2, max_size=2), st.integers(0, 3), st.booleans())
@settings(max_examples=50)
def test_a_history_is_the_text_without_its_padding(pairs, extra, left):
    prompts = [prompt for prompt, _ in pairs]
    width = 4 + extra
    ids, positions = np.full((2, width), 5), np.full((2, width), -1)
    for row, prompt in enumerate(prompts):
        at = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, at], positions[row, at] = prompt, np.arange(len(prompt))
    made = History.of_prompt(jnp.asarray(ids), jnp.asarray(positions), C)
    expected = history_of(prompts, [[], []])
    jax.tree.map(np.testing.assert_array_equal, made, expected)
    for step in range(4):
        done = jnp.asarray([step >= len(text) for _, text in pairs])
        token = jnp.asarray([text[step] if step < len(text) else 6 for _, text in pairs])
        made = made.append(token, done)
    jax.tree.map(np.testing.assert_array_equal, made, history_of(*zip(*pairs, strict=True)))


@given(st.lists(texts, min_size=2, max_size=2), st.lists(tokens.filter(bool), min_size=1, max_size=2))
@settings(max_examples=200)
def test_a_text_ends_with_a_run_of_its_new_tokens_only(pairs, runs):
    longest = 4
    padded = jnp.asarray([[-1] * (longest - len(run)) + run for run in runs])
    ended = history_of(*zip(*pairs, strict=True)).ends_with(padded)
    expected = [any(text[-len(run) :] == run for run in runs) for _, text in pairs]
    np.testing.assert_array_equal(ended, expected)


# Each penalty as its definition ---------------------------------------------------------------------------------------


@given(cases, st.sampled_from([0.5, 1.0, 1.3, 2.0]))
@settings(max_examples=EXAMPLES)
def test_repetition_divides_what_is_positive_and_multiplies_what_is_not(case, penalty):
    pairs, logits = case
    expected = np.float64(logits)
    for row, (prompt, text) in enumerate(pairs):
        for token in {*prompt, *text}:
            x = expected[row, token]
            expected[row, token] = x / penalty if x > 0 else x * penalty
    np.testing.assert_allclose(run(repetition_penalty(penalty), case), expected, rtol=1e-6, atol=1e-37)


@given(cases, st.sampled_from([-1.0, 0.0, 0.75]), st.sampled_from([0.0, 0.5]))
@settings(max_examples=EXAMPLES)
def test_presence_and_frequency_count_new_tokens_only(case, presence, frequency):
    pairs, logits = case
    expected = np.float64(logits)
    for row, (_, text) in enumerate(pairs):
        for token in text:
            expected[row, token] -= frequency + presence / text.count(token)
    out = run(chain(presence_penalty(presence), frequency_penalty(frequency)), case)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=FLOAT32)


@given(cases, st.sampled_from([1, 2, 3]))
@settings(max_examples=EXAMPLES)
def test_no_run_of_n_tokens_comes_twice(case, n):
    pairs, logits = case
    out = run(no_repeat_ngram(n), case)
    for row, (prompt, text) in enumerate(pairs):
        whole = [*prompt, *text]
        runs = [whole[i : i + n] for i in range(len(whole) - n + 1)]
        banned = {token for token in range(V) if len(whole) >= n - 1 and [*whole, token][-n:] in runs}
        expected = np.array([-np.inf if token in banned else x for token, x in enumerate(logits[row])])
        if np.isneginf(expected).all():
            expected[:] = np.nan
        np.testing.assert_array_equal(out[row], expected)


@given(cases, st.integers(0, 5), st.sampled_from([[2], [2, 6]]))
@settings(max_examples=200)
def test_no_end_comes_before_its_time(case, n, ends):
    pairs, logits = case
    if any(np.isneginf(np.delete(row, ends)).all() for row in logits):
        return
    out = run(min_new_tokens(n, ends), case)
    for row, (_, text) in enumerate(pairs):
        expected = logits[row].copy()
        expected[ends] = -np.inf if len(text) < n else expected[ends]
        np.testing.assert_array_equal(out[row], expected)


@given(cases)
@settings(max_examples=100)
def test_a_grammar_may_drive_what_is_allowed(case):
    """Brackets 0 and 1: none closes before it was opened; and a row in which nothing is allowed is NaN."""

    def may_follow(history):
        counts = history.counts(V)
        opened = counts[:, 0] > counts[:, 1]
        return jnp.stack([jnp.ones_like(opened), opened], axis=1)[:, jnp.minimum(jnp.arange(V), 2) % 2]

    pairs, logits = case
    out = run(allowed(jax.tree_util.Partial(may_follow)), case)
    for row, (prompt, text) in enumerate(pairs):
        whole = [*prompt, *text]
        banned = [] if whole.count(0) > whole.count(1) else [1]
        expected = np.array([-np.inf if token in banned else x for token, x in enumerate(logits[row])])
        np.testing.assert_array_equal(out[row], np.nan if np.isneginf(expected).all() else expected)


def test_a_row_without_any_token_left_is_nan_and_its_neighbours_are_not():
    nothing = allowed(lambda history: jnp.asarray([[True] * V, [False] * V]))
    out = nothing(jnp.zeros((2, V)), history_of([[1], [1]], [[], []]))
    np.testing.assert_array_equal(np.isnan(out).all(axis=1), [False, True])


# Transforms of logits alone -------------------------------------------------------------------------------------------


def softmax(row):
    weights = np.exp(np.float64(row) - np.max(row))
    return weights / weights.sum()


@given(cases, st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=EXAMPLES)
def test_min_p_keeps_what_is_at_least_p_times_the_likeliest(case, p):
    for row, out in zip(case[1], run(min_p(p), case), strict=True):
        share = softmax(row) / softmax(row).max()
        sure = abs(share - p) > FLOAT32  # at the bound itself float32 may go either way
        np.testing.assert_array_equal((out > -np.inf)[sure], ((share >= p) & (row > -np.inf))[sure])
        np.testing.assert_array_equal(out[out > -np.inf], row[out > -np.inf])


@given(cases, st.sampled_from([0.0, 0.2, 0.9, 1.0]))
@settings(max_examples=EXAMPLES)
def test_typical_keeps_the_tokens_whose_surprise_is_nearest_to_the_expected(case, p):
    for row, out in zip(case[1], run(typical(p), case), strict=True):
        probs = softmax(row)
        real = probs > 0
        surprise = np.full(V, np.inf)
        surprise[real] = -np.log(probs[real])
        distance = abs(surprise - (probs[real] * surprise[real]).sum())
        kept = out > -np.inf
        assert kept.any() or not np.isfinite(row).any()
        # No token that was left out is nearer than one that was kept; the mass is reached, and not without the last.
        if (~kept & real).any():
            assert distance[kept].max() <= distance[~kept & real].min() + 1e-4
            assert probs[kept].sum() >= p - FLOAT32
        if kept.sum() > 1 and p < 1:
            assert (
                probs[kept].sum() - probs[kept].max() < p + 1e-4 or distance[kept].max() - distance[kept].min() < 1e-4
            )


ALL = {
    "greedy": greedy,
    "temperature": temperature(0.7),
    "temperature 0": temperature(0.0),
    "top_k": top_k(3),
    "top_p": top_p(0.8),
    "top_p 0": top_p(0.0),
    "min_p": min_p(0.3),
    "typical": typical(0.6),
    "repetition": repetition_penalty(1.5),
    "composed": chain(
        repetition_penalty(1.5), frequency_penalty(0.5), temperature(1.3), top_k(5), top_p(0.9), min_p(0.1)
    ),
}


@pytest.mark.parametrize("name", ALL)
@given(case=cases)
@settings(max_examples=EXAMPLES // 2)
def test_every_transform_leaves_a_distribution(name, case):
    """Mass 1, no NaN, a token at least, nothing that was ruled out; cuts and temperatures keep the order."""
    logits, out = case[1], run(ALL[name], case)
    assert out.dtype == np.float32
    assert not np.isnan(out).any()
    assert (out > -np.inf).any(axis=1).all()
    assert np.isneginf(out[np.isneginf(logits)]).all()
    close(np.asarray(jax.nn.softmax(out)).sum(axis=1), 1, FLOAT32)
    if name not in ("repetition", "composed"):
        for before, after in zip(logits, out, strict=True):
            kept = np.flatnonzero(after > -np.inf)
            order = kept[np.argsort(before[kept], kind="stable")]
            assert (np.diff(after[order]) >= 0).all()


# Use ------------------------------------------------------------------------------------------------------------------


def test_a_function_of_logits_and_history_is_a_transform():
    likes_its_length = with_history(lambda logits, history: 9 * jax.nn.one_hot(history.lengths, logits.shape[-1]))
    history = history_of([[1], [1, 2]], [[3], [3, 4]])
    drawn = sample(jax.random.key(0), jnp.zeros((2, V)), chain(likes_its_length, greedy), history)
    np.testing.assert_array_equal(drawn, [2, 4])


def test_what_is_left_to_chance_needs_a_key():
    assert not needs_key(greedy)
    assert not needs_key(chain(repetition_penalty(1.2), greedy))
    assert needs_key(chain(repetition_penalty(1.2), top_k(2)))
    assert needs_key(lambda logits: logits)


def test_a_transform_of_the_text_without_a_text_is_refused():
    with pytest.raises(ValueError, match=r"reads the text so far; pass sampling\.History"):
        repetition_penalty(1.2)(jnp.zeros((1, V)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: repetition_penalty(0.0), "repetition_penalty=0.0 must be a positive finite number"),
        (lambda: repetition_penalty([1.0, -1.0]), "repetition_penalty=-1.0"),
        (lambda: presence_penalty(np.inf), "presence_penalty=inf must be a finite number"),
        (lambda: frequency_penalty(np.nan), "frequency_penalty=nan must be"),
        (lambda: no_repeat_ngram(0), "no_repeat_ngram=0 is no length of a run"),
        (lambda: min_new_tokens(-1, 2), r"min_new_tokens\(-1, 2\) needs a number from 0"),
        (lambda: min_new_tokens(1, []), "needs a number from 0 on, and the ids of the end tokens"),
        (lambda: min_new_tokens(1, [-1]), "the ids of the end tokens"),
        (lambda: min_p(1.5), "min_p=1.5 is not a probability"),
        (lambda: typical(-0.5), "typical=-0.5 is not a probability"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Transforms of logits against the oracle, and draws against the distribution that they stand for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draw import close
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FLOAT32

from jaxformer.sampling import as_pytree, chain, greedy, sample, temperature, top_k, top_p

WIDTHS = (1, 2, 3, 7, 50)
CHI_SQUARE_11 = 31.3
"""One sample in a thousand exceeds it, of 12 classes; the keys are fixed, so that a test passes always or never."""


@jax.jit
def transformed(transform, logits):
    return transform(logits)


draw = jax.jit(sample)


@jax.jit
def draws(keys, logits, transform):
    return jax.vmap(lambda key: sample(key, logits, transform))(keys)


def numbers(*extreme):
    """Few different values, so that many are equal; -inf is a token that is ruled out already."""
    usual = st.sampled_from([-np.inf, -2.5, -1.0, -0.0, 0.0, 0.5, 0.625, 3.0])
    return usual | st.sampled_from(extreme) if extreme else usual


@st.composite
def rows(pick, *extreme):
    V = pick(st.sampled_from(WIDTHS))
    made = np.asarray(pick(st.lists(st.lists(numbers(*extreme), min_size=V, max_size=V), min_size=2, max_size=2)))
    at = pick(st.integers(0, V - 1))
    made[:, at] = np.where(np.isneginf(made[:, at]), 0.25, made[:, at])  # one token at least can be drawn
    return made.astype(np.float32)


def same(actual, expected, atol=0.0):
    """The same tokens are ruled out, and the others have the same logits."""
    actual = np.asarray(actual, np.float64)
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    close(np.where(np.isneginf(actual), 0, actual), np.where(np.isneginf(expected), 0, expected), atol)


@given(rows(1e30, -1e30, 3.4e38, -3.4e38))
def test_greedy_keeps_the_likeliest_and_of_equals_the_first(logits):
    same(transformed(greedy, logits), oracle.top_k(logits, 1))


@given(rows(1e30, -1e30, 3.4e38, -3.4e38), st.integers(1, 60))
@settings(max_examples=60)
def test_top_k_keeps_exactly_the_k_likeliest_and_of_equals_the_first(logits, k):
    # k is static: few values, or each example would be compiled.
    k = min((1, 2, 3, 5, 60), key=lambda size: abs(size - k))
    same(transformed(top_k(k), logits), oracle.top_k(logits, k))


@pytest.mark.parametrize("transform", [greedy, top_k(1), top_p(0.0), temperature(0.0)])
def test_negative_zero_equals_zero(transform):
    same(transform(jnp.asarray([[-1.0, -0.0, 0.0], [0.0, -0.0, -1.0]])), np.where([[0, 1, 0], [1, 0, 0]], 0.0, -np.inf))


@given(rows(1e30, -1e30, 3.4e38, -3.4e38), st.sampled_from([0.0, 1e-37, 1e-30, 0.01, 0.7, 1.0, 2.0, 100.0]))
def test_temperature_is_the_oracles_distribution_at_any_size(logits, t):
    tempered = transformed(temperature(t), logits)
    assert not np.isnan(tempered).any()
    with np.errstate(over="ignore"):
        close(jax.nn.softmax(tempered), oracle.softmax(oracle.temperature(logits, t)), FLOAT32)


@given(rows(20.0, -40.0), st.floats(0, 1))
@settings(max_examples=200)
def test_top_p_keeps_the_likeliest_until_their_mass_reaches_p(logits, p):
    kept = np.asarray(transformed(top_p(p), logits))
    for row, out in zip(logits, kept, strict=True):
        order, size = oracle.ranked(row), int((~np.isneginf(out)).sum())
        mass = np.cumsum(oracle.softmax(row)[order])
        assert size >= 1
        same(out, oracle.keep(np.float64(row), order[:size]))
        # The smallest such set, where the mass is not p up to rounding.
        assert mass[size - 1] >= p - FLOAT32 or size == (~np.isneginf(row)).sum()
        assert size == 1 or mass[size - 2] < p + FLOAT32


@given(rows(20.0, -40.0))
def test_the_ends_of_top_p_are_exact(logits):
    same(transformed(top_p(0.0), logits), oracle.top_p(logits, 0.0))
    same(transformed(top_p(1.0), logits), logits)


@pytest.mark.parametrize("V", [1, 1000, 50257])
def test_p_of_one_keeps_every_token_of_a_long_tail(V):
    logits = -30 * jnp.linspace(0, 1, V)[None]
    np.testing.assert_array_equal(transformed(top_p(1.0), logits), logits)


@pytest.mark.parametrize("transform", [temperature(1.0), temperature(0.0), top_k(2), top_p(0.9), greedy])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transforms_are_computed_in_float32(transform, dtype):
    logits = jnp.asarray([[1.0, 3.0, 2.0]], dtype)
    out = transform(logits)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, transform(logits.astype(jnp.float32)))


@pytest.mark.parametrize(
    "transform",
    [
        greedy,
        temperature(0),
        temperature(1e-45),  # 0 to many a processor
        temperature(1e-30),
        top_p(0.0),
        top_k(1),
        chain(temperature(0.0), top_k(1), top_p(0.0)),
    ],
)
def test_every_limit_of_sampling_is_greedy_under_every_key(transform):
    logits = jnp.asarray([[1.0, 3.0, 2.0], [5.0, 10.0, -jnp.inf]])
    keys = jax.vmap(jax.random.key)(jnp.arange(100))
    np.testing.assert_array_equal(draws(keys, logits, transform), np.ones((100, 2)))
    assert not np.isnan(transform(logits)).any()


def test_temperatures_and_nuclei_may_differ_by_row(rng):
    logits, t = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32), [0.0, 0.5, 2.0]
    close(jax.nn.softmax(temperature(t)(logits)), oracle.softmax(oracle.temperature(logits, t)), FLOAT32)
    p = jnp.asarray([0.0, 0.5, 1.0])
    expected = np.stack([oracle.top_p(row, float(of_row)) for row, of_row in zip(np.asarray(logits), p, strict=True)])
    same(top_p(p)(logits), expected)
    drawn = draws(jax.random.split(jax.random.key(0), 100), logits, temperature([0.0, 1.0, 0.0]))
    assert set(drawn[:, 0].tolist()) == {int(logits[0].argmax())}
    assert len(set(drawn[:, 1].tolist())) > 1


def test_a_chain_applies_its_transforms_in_the_order_given():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2]]))
    hot, nucleus = temperature(4.0), top_p(0.5)
    np.testing.assert_array_equal(chain(hot, nucleus)(logits), nucleus(hot(logits)))
    np.testing.assert_array_equal(chain(nucleus, hot)(logits), hot(nucleus(logits)))
    assert np.isfinite(chain(hot, nucleus)(logits)).sum() == 2  # tempered to 0.38, 0.33, 0.30 first
    assert np.isfinite(chain(nucleus, hot)(logits)).sum() == 1
    np.testing.assert_array_equal(chain()(logits), logits)
    np.testing.assert_array_equal(chain(chain(hot), nucleus)(logits), chain(hot, nucleus)(logits))


def chi_square(tokens, probabilities):
    expected = len(tokens) * np.asarray(probabilities)
    return ((np.bincount(tokens, minlength=len(expected)) - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("transform", "t"), [(chain(), 1), (temperature(1.5), 1.5), (top_k(12), 1), (top_p(1.0), 1), (lambda x: x, 1)]
)
def test_draws_follow_the_softmax(transform, t, dtype, rng):
    """From logits of either type: noise of bfloat16 has too few values and favours some tokens."""
    logits = jnp.asarray(rng.normal(size=12), dtype)
    tokens = np.asarray(draw(jax.random.key(1), jnp.tile(logits, (50_000, 1)), as_pytree(transform)))
    assert chi_square(tokens, oracle.softmax(oracle.temperature(logits, t))) < CHI_SQUARE_11


def test_draws_follow_what_the_transforms_leave(rng):
    logits = jnp.asarray(rng.normal(size=12), jnp.float32)
    tokens = np.asarray(draw(jax.random.key(2), jnp.tile(logits, (50_000, 1)), chain(temperature(0.7), top_k(5))))
    left = oracle.softmax(oracle.top_k(oracle.temperature(logits, 0.7), 5))
    kept = np.flatnonzero(left)
    assert set(tokens.tolist()) == set(kept.tolist())
    assert chi_square(np.searchsorted(kept, tokens), left[kept]) < CHI_SQUARE_11


def test_a_rows_draw_does_not_depend_on_the_other_rows(rng):
    logits = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 50)
    together = draws(keys, logits, temperature(1.0))
    np.testing.assert_array_equal(together[:, :2], draws(keys, logits[:2], temperature(1.0)))
    other = draws(keys, logits.at[1:].set(-logits[1:]), temperature(1.0))
    np.testing.assert_array_equal(together[:, 0], other[:, 0])
    assert (together[:, 1:] != other[:, 1:]).any()


def test_rows_of_one_text_and_keys_of_one_row_draw_differently():
    logits = jnp.zeros((1000, 50))
    a, b, again = (np.asarray(draw(jax.random.key(seed), logits, chain())) for seed in (0, 1, 0))
    for first, second in ((a[:-1], a[1:]), (a, b)):
        assert abs((first == second).mean() - 1 / 50) < 0.02
    assert (a.dtype, a.shape) == (np.dtype("int32"), (1000,))
    np.testing.assert_array_equal(a, again)


def test_new_numbers_recompile_nothing():
    traced = []

    @jax.jit
    def run(key, logits, transform):
        traced.append(transform)
        return sample(key, logits, transform)

    logits = jnp.zeros((2, 5))
    for t, p in [(0.7, 0.9), (1, 1), (0, 0), (np.float32(2), np.float64(0.5)), (jnp.asarray(0.1), jnp.asarray(0.2))]:
        run(jax.random.key(0), logits, chain(temperature(t), top_p(p)))
    assert len(traced) == 1
    for t in ([0, 1], [0.5, 2.0], np.asarray([1.0, 3.0]), jnp.ones(2)):
        run(jax.random.key(0), logits, temperature(t))
    assert len(traced) == 2


def test_transforms_can_be_made_inside_of_jit():
    @jax.jit
    def run(logits, t):
        return temperature(t)(logits), chain(temperature(0.5), top_p(0.8), top_k(2))(logits)

    logits = jnp.asarray([[1.0, 3.0, 2.0]])
    outer, inner = run(logits, 0.5)
    np.testing.assert_array_equal(outer, temperature(0.5)(logits))
    np.testing.assert_array_equal(inner, chain(temperature(0.5), top_p(0.8), top_k(2))(logits))


def test_any_function_of_logits_is_a_transform():
    def ban(logits, token):
        return logits.at[:, token].set(-jnp.inf)

    logits = jnp.asarray([[1.0, 3.0, 2.0]])
    only = chain(partial(ban, token=1), greedy)
    assert sample(jax.random.key(0), logits, only) == 2
    np.testing.assert_array_equal(jax.jit(lambda f, x: f(x))(only, logits), [[-jnp.inf, -jnp.inf, 2.0]])


@pytest.mark.parametrize("t", [-0.1, np.nan, np.inf, [1.0, -1.0]])
def test_a_temperature_is_not_negative_and_finite(t):
    wrong = t[1] if isinstance(t, list) else t
    with pytest.raises(ValueError, match=rf"temperature {wrong} must be 0 \(greedy\) or a positive finite number"):
        temperature(t)


@pytest.mark.parametrize("p", [-0.1, 1.1, np.nan, [0.5, 2.0]])
def test_top_p_is_a_probability(p):
    with pytest.raises(ValueError, match=rf"top_p={p[1] if isinstance(p, list) else p} is not a probability"):
        top_p(p)


@pytest.mark.parametrize("k", [0, -1])
def test_top_k_keeps_something(k):
    with pytest.raises(ValueError, match=f"top_k={k} would keep no token; it must be at least 1"):
        top_k(k)

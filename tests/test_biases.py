"""Score biases against the oracle, in closed form, as arrays and as functions of positions, and their gradients."""

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerances import CACHED, FLOAT32, GRADIENT

import jaxformer as jf
from jaxformer.attention import attention
from jaxformer.biases import Alibi, Relative, alibi_slopes, bucket_starts

AT = np.array([[0, 1, 2, 3, 4, 300], [-1, -1, 0, 7, 8, 64]])
TO = np.array([[0, 5, 2, 9], [8, 0, -1, 130]])


def test_slopes_of_a_power_of_two_and_between():
    assert alibi_slopes(4) == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert alibi_slopes(6) == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    for heads in range(1, 70):
        np.testing.assert_allclose(alibi_slopes(heads), oracle.alibi_slopes(heads), rtol=1e-12)


def test_one_query_over_earlier_keys_has_the_bias_of_its_own_position():
    """The rows of the first queries, or no bias at all, would give 2.19 or 2.5 in the first head."""
    q, k, v = jnp.zeros((1, 1, 4, 2)), jnp.zeros((1, 4, 4, 2)), jnp.arange(1.0, 5)[None, :, None, None]
    mask = jf.Mask(jnp.asarray([[3]]), jnp.arange(4)[None], causal=True)
    bias = Alibi(jnp.asarray(alibi_slopes(4)))
    for implementation in ("einsum", "chunked"):
        z = attention(q, k, v.repeat(4, 2).repeat(2, 3), mask, bias, scale=1.0, implementation=implementation)
        draw.close(z[0, 0, :, 0], [2.8070952, 2.5780387, 2.5195299, 2.5048828], FLOAT32)


def test_slopes_times_distances_are_the_oracles():
    bias = Alibi(jnp.asarray(alibi_slopes(3)))
    draw.close(bias(jnp.asarray(AT), jnp.asarray(TO)), oracle.alibi(AT, TO, 3), FLOAT32)


@given(st.integers(2, 40), st.integers(2, 400))
def test_buckets_are_the_oracles(buckets, reach):
    if reach <= buckets // 2:
        with pytest.raises(ValueError, match=f"cannot reach to {reach}; give at least 2 buckets a side"):
            bucket_starts(buckets, reach)
        return
    starts = bucket_starts(buckets, reach)
    distances = np.arange(reach + 3)
    expected = [oracle.relative_bucket(int(distance), buckets, reach, False) for distance in distances]
    np.testing.assert_array_equal(np.searchsorted(starts, distances, side="right"), expected)


def test_published_buckets():
    """Distances at which the 32 buckets of the published models begin, reach 128: both sides, and one side."""
    assert bucket_starts(16, 128) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert bucket_starts(32, 128) == [*range(1, 17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize(("buckets", "reach"), [(8, 10), (32, 128)])
def test_looked_up_distances_are_the_oracles(two_sided, buckets, reach, rng):
    table = rng.normal(size=(buckets, 3)).astype(np.float32)
    bias = Relative(jnp.asarray(table.T), two_sided, reach)
    expected = oracle.relative(AT, TO, table, reach, two_sided)
    made = bias(jnp.asarray(AT), jnp.asarray(TO))
    np.testing.assert_array_equal(made, np.asarray(expected, np.float32))


@pytest.mark.parametrize("two_sided", [False, True])
def test_the_gradient_of_the_table_is_that_of_the_lookup(two_sided, rng):
    bias = Relative(jnp.asarray(rng.normal(size=(3, 8)), jnp.float32), two_sided, 10)
    at, to = jnp.asarray(AT), jnp.asarray(TO)
    gradient = jnp.asarray(rng.normal(size=(2, 3, 6, 4)), jnp.float32)
    expected = np.zeros((3, 8))
    for b, n, t, s in np.ndindex(2, 3, 6, 4):
        expected[n, oracle.relative_bucket(int(AT[b, t] - TO[b, s]), 8, 10, two_sided)] += gradient[b, n, t, s]
    _, pull = jax.vjp(lambda bias: bias(at, to), bias)
    for found in (bias.pullback(at, to, gradient), pull(gradient)[0]):
        draw.close(found.table, expected, GRADIENT)


BIASES = {
    "alibi": lambda rng: Alibi(jnp.asarray(rng.uniform(size=4), jnp.float32)),
    "one side": lambda rng: Relative(jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), False, 20),
    "two sides": lambda rng: Relative(jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), True, 20),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", BIASES)
def test_a_function_of_positions_is_its_array_with_all_gradients(kind, causal, rng, monkeypatch):
    """Block by block in chunked, in one piece in einsum."""
    import jaxformer.attention.chunked as chunked

    monkeypatch.setattr(chunked, "QUERIES", 8)
    monkeypatch.setattr(chunked, "KEYS", 16)
    bias, at = BIASES[kind](rng), jnp.asarray(np.stack([np.arange(29), np.arange(29) - 3]).clip(-1))
    q, k, v, weights = (jnp.asarray(rng.normal(size=(2, 29, n, 4)), jnp.float32) for n in (4, 2, 2, 4))
    mask = jf.Mask(at, at, causal=causal)

    def loss(implementation, function, q, k, v, bias):
        given = bias if function else bias(at, at)
        return (attention(q, k, v, mask, given, scale=0.5, implementation=implementation) * weights).sum()

    value_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=(2, 3, 4, 5)), static_argnums=(0, 1))
    expected = value_and_gradients("einsum", False, q, k, v, bias)
    for implementation in ("einsum", "chunked"):
        found = value_and_gradients(implementation, True, q, k, v, bias)
        jax.tree.map(lambda a, b: draw.close(a, b, CACHED), found, expected)


def test_a_bias_without_a_pullback_of_its_own_has_that_of_its_function(rng):
    bias = BIASES["alibi"](rng)
    gradient = jnp.asarray(rng.normal(size=(2, 4, 6, 4)), jnp.float32)
    distance = abs(AT[:, None, :, None] - TO[:, None, None, :])
    expected = -(np.asarray(gradient) * distance).sum(axis=(0, 2, 3))
    found = bias.pullback(jnp.asarray(AT), jnp.asarray(TO), gradient)
    np.testing.assert_allclose(found.slopes, expected, rtol=1e-5)


def test_the_table_of_a_model_learns():
    model, params = draw.model(positions="relative", relative_buckets=4, relative_reach=5)
    ids = draw.ids(1, 6)
    gradient = jax.jit(jax.grad(lambda params: (draw.apply(model, {"params": params}, ids) ** 2).sum()))(params)
    assert params["decoder"]["relative_bias"]["embedding"].shape == (4, 4)
    assert (np.asarray(gradient["decoder"]["relative_bias"]["embedding"]) != 0).all()

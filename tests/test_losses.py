"""Losses: the oracle's numbers, and no trace of the tokens that do not count."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draw import close
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tolerances import FLOAT32

from jaxformer.losses import cross_entropy, weighted_mean, weighted_sum

OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 0.3, "z_loss": 1e-2}]


compiled = partial(jax.jit, static_argnames=("label_smoothing", "z_loss"))


@compiled
def mean(logits, labels, weights, **options):
    return weighted_mean(cross_entropy(logits, labels, **options), weights)


@compiled
def mean_and_gradient(*batch, **options):
    return jax.value_and_grad(mean)(*batch, **options)


def numbers(low, high):
    """Exact in float32 and in bfloat16."""
    return st.integers(8 * low, 8 * high).map(lambda eighths: eighths / 8)


@st.composite
def batches(draw):
    """Logits, labels and weights; a token of weight 0 may have any label whatever."""
    B, T, V = 2, 3, draw(st.sampled_from([1, 2, 5]))
    logits = draw(hnp.arrays(np.float32, (B, T, V), elements=numbers(-4, 4)))
    weights = draw(hnp.arrays(np.float32, (B, T), elements=numbers(0, 3)))
    labels = draw(hnp.arrays(np.int32, (B, T), elements=st.integers(0, V - 1)))
    ignored = draw(hnp.arrays(np.int32, (B, T), elements=st.integers(-(2**31), 2**31 - 1)))
    return logits, np.where(weights > 0, labels, ignored), weights


@given(batches(), st.sampled_from(OPTIONS))
def test_the_mean_is_the_oracles(batch, options):
    close(mean(*map(jnp.asarray, batch), **options), oracle.cross_entropy(*batch, **options), FLOAT32)


@given(batches(), st.sampled_from(OPTIONS))
def test_the_gradient_of_a_token_without_weight_is_exactly_zero_and_every_other_is_finite(batch, options):
    logits, labels, weights = map(jnp.asarray, batch)
    _, gradient = map(np.asarray, mean_and_gradient(logits, labels, weights, **options))
    assert np.isfinite(gradient).all()
    assert not gradient[np.asarray(weights) == 0].any()


@pytest.mark.parametrize("options", OPTIONS)
def test_the_gradient_is_the_oracles_by_central_differences(options, rng):
    logits, labels = rng.normal(size=(2, 3, 4)), rng.integers(4, size=(2, 3))
    weights = np.array([[1, 0, 2], [0.5, 1, 0]])
    batch = jnp.asarray(logits, jnp.float32), jnp.asarray(labels), jnp.asarray(weights)
    _, gradient = mean_and_gradient(*batch, **options)
    numeric, step = np.zeros_like(logits), 1e-5
    for at in np.ndindex(*logits.shape):
        nudge = np.zeros_like(logits)
        nudge[at] = step
        up, down = (oracle.cross_entropy(x, labels, weights, **options) for x in (logits + nudge, logits - nudge))
        numeric[at] = (up - down) / (2 * step)
    close(gradient, numeric, FLOAT32)


def test_smoothing_counts_neither_the_loss_nor_the_number_of_ignored_tokens():
    logits, labels = jnp.asarray([[2.0, 0, 0, 0], [0, 9.0, 0, 0]]), jnp.asarray([0, -100])
    both = mean(logits, labels, jnp.asarray([1.0, 0]), label_smoothing=0.1)
    close(both, 0.4907530, FLOAT32)  # 0.9 * 0.3407530 + 0.1 * 1.8407530 - and not 1.166, 0.245 or 0.583
    close(both, mean(logits[:1], labels[:1], jnp.ones(1), label_smoothing=0.1), FLOAT32)


@pytest.mark.parametrize("options", OPTIONS)
def test_where_nothing_has_weight_the_loss_is_zero_with_zero_gradients(options):
    logits = jnp.asarray([[1.0, -1e10], [1e10, 2]])
    loss, gradient = mean_and_gradient(logits, jnp.asarray([5, -1]), jnp.zeros(2), **options)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)


def test_means_weigh_by_token_and_not_by_batch():
    """Of 1 token of loss 4 and 3 tokens of loss 1: 7 / 4, and not the mean of means 2.5."""
    values, weights = jnp.asarray([[4.0, 9, 9], [1, 1, 1]]), jnp.asarray([[1.0, 0, 0], [1, 1, 1]])
    assert weighted_mean(values, weights) == 1.75
    total, weight = map(sum, zip(*map(weighted_sum, values, weights), strict=True))
    assert (total, weight) == (7, 4)


def test_a_value_without_weight_does_not_enter_whatever_it_is():
    values = jnp.asarray([jnp.nan, 1.0, jnp.inf, 3, -jnp.inf])
    weights = jnp.asarray([0.0, 1, 0, 3, 0])
    assert [x.item() for x in weighted_sum(values, weights)] == [10, 4]
    assert weighted_mean(values, weights) == 2.5
    np.testing.assert_array_equal(jax.grad(weighted_mean)(values, weights), [0, 0.25, 0, 0.75, 0])


@pytest.mark.parametrize("label", [-1, -100, 4, 2**31 - 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_label_outside_the_vocabulary_is_nan_where_it_counts_and_nothing_where_it_does_not(label, options):
    logits, labels = jnp.zeros((2, 4)), jnp.asarray([label, 1])
    assert np.isnan(cross_entropy(logits, labels, **options)).tolist() == [True, False]
    assert np.isnan(mean(logits, labels, jnp.ones(2), **options))
    assert mean(logits, labels, jnp.asarray([0.0, 1]), **options) == mean(
        logits[1:], labels[1:], jnp.ones(1), **options
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_bfloat16_logits_give_the_float32_loss_of_the_same_numbers(options, rng):
    logits = jnp.asarray(3 * rng.normal(size=(5, 300)), jnp.bfloat16)
    labels = jnp.asarray(rng.integers(300, size=5))
    loss = cross_entropy(logits, labels, **options)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, cross_entropy(logits.astype(jnp.float32), labels, **options))
    close(
        mean(logits, labels, jnp.ones(5), **options),
        oracle.cross_entropy(logits, labels, np.ones(5), **options),
        FLOAT32,
    )


def test_logits_of_any_size_give_a_finite_loss_and_gradient():
    logits = jnp.asarray([[1e30, 0.0, -1e30], [0.0, -1e30, 0.0]])
    loss, gradient = mean_and_gradient(logits, jnp.asarray([0, 2]), jnp.ones(2))
    close(loss, np.log(2) / 2, FLOAT32)
    close(gradient, [[0, 0, 0], [0.25, 0, -0.25]], FLOAT32)


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, np.nan])
def test_smoothing_is_a_share_below_one(value):
    with pytest.raises(ValueError, match=f"label_smoothing={value} must be from 0 up to, but without, 1"):
        cross_entropy(jnp.zeros((1, 2)), jnp.zeros(1, int), label_smoothing=value)


@pytest.mark.parametrize("value", [-1e-3, np.nan])
def test_z_loss_is_not_negative(value):
    with pytest.raises(ValueError, match=f"z_loss={value} must not be negative"):
        cross_entropy(jnp.zeros((1, 2)), jnp.zeros(1, int), z_loss=value)

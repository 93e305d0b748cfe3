"""Attention over the layers of a cache: the oracle's numbers from the slots in use, read in blocks."""

import importlib

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import BFLOAT16, FLOAT32

import jaxformer as jf
from jaxformer.attention import cached_attention
from jaxformer.cache import LayerView
from jaxformer.storage import KV

L, B, K, H = 3, 2, 2, 4
GARBAGE = 1e4  # what unused slots hold: it must not count


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(importlib.import_module("jaxformer.attention.cached"), "BLOCK", 4)


def make(**options):
    """A compiled call; a new one for each test, because the block size is read when it is traced."""

    @jax.jit
    def run(q, k, v, layer, length, mask, bias=None):
        return cached_attention(q, LayerView(KV(k, v), layer, length), mask, bias, **options)

    return run


def slots(rng, capacity, T, N, dtype):
    shapes = (B, T, N, H), (L, B, K, capacity, H), (L, B, K, capacity, H)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("bias_rows", "softcap", "N"), [(None, None, 2), (1, None, 4), (2, 1.5, 6)])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("capacity", [3, 4, 5, 10])
def test_every_length_of_every_capacity_is_the_oracles(capacity, T, bias_rows, softcap, N, dtype, rng):
    q, k, v = slots(rng, capacity, T, N, dtype)
    bias = None if bias_rows is None else rng.normal(size=(bias_rows, N, T, capacity)).astype(np.float32)
    run = make(scale=0.7, softcap=softcap)
    for length in range(T, capacity + 1):
        layer = length % L
        # The second row has a hole before its last tokens, as after a shorter prompt on the right of which is padding.
        at = np.full((B, capacity), -1)
        at[:, :length] = np.arange(length)
        at[1, : length - T] = np.where(np.arange(length - T) % 3 == 1, -1, at[1, : length - T])
        q_at = at[:, length - T : length]
        used = (np.arange(capacity) < length)[:, None]
        mask = jf.Mask(jnp.asarray(q_at), jnp.asarray(at), causal=True)
        z = run(q, jnp.where(used, k, GARBAGE), jnp.where(used, v, GARBAGE), layer, length, mask, bias)
        keys, values = (np.swapaxes(np.asarray(x[layer], np.float64), 1, 2) for x in (k, v))
        allowed = oracle.allowed(q_at, at, causal=True)
        expected = oracle.attention(np.asarray(q, np.float64), keys, values, allowed, bias, scale=0.7, softcap=softcap)
        assert z.dtype == dtype
        draw.close(z, expected, FLOAT32 if dtype == "float32" else BFLOAT16)


def test_a_query_that_sees_nothing_gives_zero(rng):
    q, k, v = slots(rng, 6, 2, 4, "float32")
    at = jnp.asarray([[-1, 0, -1, -1, -1, -1], [-1, -1, -1, -1, -1, -1]])
    z = make(scale=1.0)(q, k, v, 0, 2, jf.Mask(at[:, :2], at, causal=True))
    np.testing.assert_array_equal(z[1], 0)
    np.testing.assert_array_equal(z[0, 0], 0)
    assert z[0, 1].all()
    assert not make(scale=1.0)(q, k, v, 0, 0, jf.Mask(at[:, :2], at, causal=True)).any()  # an empty cache


def test_decoding_one_token_at_a_time_sees_all_before_it():
    """q = k = 0 and v_t = t + 1 in a cache of 8: the means 1, 1.5, 2, 2.5, and not the first value for ever."""
    v = jnp.broadcast_to(jnp.arange(1.0, 9)[:, None], (1, 1, 1, 8, 2))
    run = make(scale=1.0)
    for t, mean in enumerate([1.0, 1.5, 2.0, 2.5, 3.0, 3.5]):
        at = jnp.where(jnp.arange(8) <= t, jnp.arange(8), -1)[None]
        mask = jf.Mask(jnp.asarray([[t]]), at, causal=True)
        draw.close(run(jnp.zeros((1, 1, 1, 2)), 0 * v, v, 0, t + 1, mask), np.full((1, 1, 1, 2), mean), FLOAT32)


@pytest.mark.parametrize(("N", "K"), [(4, 2), (6, 2), (8, 1), (3, 3)])
def test_query_heads_share_key_value_heads_in_consecutive_groups(N, K):
    v = jnp.broadcast_to(10.0 * jnp.arange(1, K + 1)[:, None, None], (1, 1, K, 5, 2))
    z = make(scale=1.0)(jnp.zeros((1, 1, N, 2)), 0 * v, v, 0, 5, jf.Mask.full(1, 5))
    np.testing.assert_array_equal(z[0, 0, :, 0], np.repeat(10.0 * np.arange(1, K + 1), N // K))


def test_a_window_over_the_cache_counts_the_token_itself():
    v = jnp.broadcast_to(jnp.arange(10.0)[:, None], (1, 1, 1, 10, 2))
    run = make(scale=1.0)
    expected = [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    for t in range(10):
        at = jnp.where(jnp.arange(10) <= t, jnp.arange(10), -1)[None]
        mask = jf.Mask(jnp.asarray([[t]]), at, causal=True, window=4)
        draw.close(run(jnp.zeros((1, 1, 1, 2)), 0 * v, v, 0, t + 1, mask), np.full((1, 1, 1, 2), expected[t]), FLOAT32)


def test_scores_are_float32_under_bfloat16():
    """Scores of 256 and 257 are one number in bfloat16; the weights must be those of a difference of 1."""
    q, k = jnp.asarray([[[[16.0, 1.0]]]], jnp.bfloat16), jnp.asarray([[[[[16.0, 0.0], [16.0, 1.0]]]]], jnp.bfloat16)
    v = jnp.asarray([[[[[0.0, 0.0], [1.0, 1.0]]]]], jnp.bfloat16)
    z = make(scale=1.0)(q, k, v, 0, 2, jf.Mask.full(1, 2))
    draw.close(z, np.full((1, 1, 1, 2), 1 / (1 + np.exp(-1))), BFLOAT16)


def test_large_scores_do_not_overflow(rng):
    q, k, v = slots(rng, 7, 2, 4, "float32")
    at = np.tile(np.arange(7), (B, 1))
    z = make(scale=1e4)(q, k, v, 1, 7, jf.Mask(jnp.asarray(at[:, 5:]), jnp.asarray(at), causal=True))
    keys, values = (np.swapaxes(x[1], 1, 2) for x in (k, v))
    draw.close(z, oracle.attention(q, keys, values, oracle.allowed(at[:, 5:], at, causal=True), scale=1e4), FLOAT32)


def test_the_cost_follows_the_text_and_not_the_capacity():
    """No product over all slots is in the program: blocks only, in a loop whose count is the length's."""
    capacity = 1000
    at = jnp.zeros((B, capacity), jnp.int32)
    arguments = jnp.zeros((B, 1, K, H)), jnp.zeros((L, B, K, capacity, H)), jnp.zeros((L, B, K, capacity, H))
    text = make(scale=1.0).lower(*arguments, 0, 5, jf.Mask(at[:, :1], at, causal=True)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert "while" in text
    assert not any(str(capacity) in line for line in products)


def test_a_bias_of_positions_is_the_same_as_its_array(rng):
    at, slots = jnp.asarray([[3]]), jnp.asarray([[0, 1, 2, 3, -1, -1]])
    mask = jf.Mask(at, slots, causal=True)
    q = jnp.asarray(rng.normal(size=(1, 1, 2, 4)), jnp.float32)
    kv = KV(*(jnp.asarray(rng.normal(size=(1, 1, 2, 6, 4)), jnp.float32) for _ in range(2)))
    view = LayerView(kv, 0, jnp.asarray(4))

    def bias(q, kv):
        return -jnp.asarray([0.5, 0.25])[:, None, None] * (q[:, None, :, None] - kv[:, None, None])

    biases = jax.tree_util.Partial(bias), bias(at, slots)
    ours, theirs = (cached_attention(q, view, mask, b, scale=0.5) for b in biases)
    np.testing.assert_array_equal(ours, theirs)
    assert np.abs(ours - cached_attention(q, view, mask, scale=0.5)).max() > 0.01


def test_a_mask_of_the_tokens_is_refused_over_a_cache():
    """It would be cut at the slots' places, and show a query keys that are not there."""
    model, params = draw.model()
    cache = jf.init_cache(model.config, 1, 16)
    with pytest.raises(ValueError, match=r"x \(1, 8\), but .* 16 keys; over a cache, make it of the positions of all"):
        model.apply({"params": params}, draw.ids(1, 8), mask=jf.Mask.causal(8), cache=cache)


@pytest.mark.parametrize(("bias", "queries"), [((1, 4, 8, 8), 8), ((3, 4, 8, 16), 8), (None, 7)])
def test_terms_of_other_queries_or_slots_are_refused_over_a_cache(bias, queries, unchecked):
    q, kv = jnp.ones((1, 8, 4, 4)), KV(*(jnp.ones((1, 1, 2, 16, 4)) for _ in range(2)))
    mask = jf.Mask(jnp.arange(queries)[None], jnp.arange(16)[None], causal=True)
    with pytest.raises(ValueError, match="the mask is of positions" if bias is None else "bias has shape"):
        cached_attention(
            q, LayerView(kv, 0, jnp.asarray(8)), mask, None if bias is None else jnp.zeros(bias), scale=0.5
        )

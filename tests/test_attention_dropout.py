"""Dropout of the pattern: the right rate, independent everywhere, the same in every implementation and pass."""

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import CACHED, FLOAT32

import jaxformer as jf
import jaxformer.attention.chunked as chunked
from jaxformer.attention import Dropout, attention
from jaxformer.attention.dropout import keep_weights


def kept(rate=0.3, seed=0, B=2, N=3, T=60, S=70):
    seeds = Dropout(jax.random.key(seed), rate).seeds()
    return np.asarray(keep_weights(rate, seeds, B, N, jnp.arange(T), jnp.arange(S)))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_weights_are_dropped_at_the_rate_and_the_others_make_up_for_it(rate):
    weights = kept(rate)
    np.testing.assert_allclose(np.unique(weights), [0, 1 / (1 - rate)] if rate else [1], rtol=1e-6)
    spread = 5 * np.sqrt(rate * (1 - rate) / weights.size)
    assert abs((weights == 0).mean() - rate) <= spread


def test_rows_heads_queries_keys_and_random_keys_are_independent():
    first, other = kept(0.5) == 0, kept(0.5, seed=1) == 0
    pairs = [
        (first, other), (first[0], first[1]), (first[:, 0], first[:, 1]), (first[:, :, 1:], first[:, :, :-1]),
        (first[..., 1:], first[..., :-1]), (first[:, :, 1:, 1:], first[:, :, :-1, :-1]),
        (first[..., :60], first[..., :60].swapaxes(2, 3)),
    ]  # fmt: skip
    for a, b in pairs:
        off_diagonal = a != b if a.shape[-2:] != (60, 60) else (a != b)[..., ~np.eye(60, dtype=bool)]
        assert abs(off_diagonal.mean() - 0.5) < 5 * 0.5 / np.sqrt(off_diagonal.size)


def test_a_block_has_the_weights_of_its_place():
    seeds = Dropout(jax.random.key(0), 0.3).seeds()
    block = keep_weights(0.3, seeds, 2, 3, 7 + jnp.arange(5), 20 + jnp.arange(9))
    np.testing.assert_array_equal(block, kept()[:, :, 7:12, 20:29])


def inputs(rng, T=29):
    return [jnp.asarray(rng.normal(size=(2, T, n, 4)), jnp.float32) for n in (4, 2, 2, 4)]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunked_drops_what_einsum_drops_with_the_same_gradients(softcap, rng, monkeypatch):
    monkeypatch.setattr(chunked, "QUERIES", 8)
    monkeypatch.setattr(chunked, "KEYS", 16)
    *qkv, weights = inputs(rng)
    bias, dropout = jnp.asarray(rng.normal(size=(1, 4, 29, 29)), jnp.float32), Dropout(jax.random.key(3), 0.4)

    def loss(implementation, q, k, v, bias):
        z = attention(
            q, k, v, jf.Mask.causal(29), bias, scale=0.5, softcap=softcap, dropout=dropout,
            implementation=implementation,
        )  # fmt: skip
        return (z * weights).sum()

    found, expected = (
        jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)(name, *qkv, bias)
        for name in ("chunked", "einsum")
    )
    jax.tree.map(lambda a, b: draw.close(a, b, CACHED), found, expected)


def test_a_dropped_pattern_is_the_pattern_times_the_weights(rng):
    q, k, v, _ = inputs(rng, T=9)
    read = []
    options = {
        "dropout": Dropout(jax.random.key(0), 0.3),
        "pattern_fn": lambda pattern: read.append(pattern) or pattern,
    }
    z = attention(q, k, v, jf.Mask.full(9, 9), scale=0.5, **options)
    dropped = np.asarray(read[0]) * kept(T=9, S=9, N=4)
    draw.close(z, np.einsum("bnts,bsnh->btnh", dropped, np.repeat(np.asarray(v), 2, axis=2)), FLOAT32)
    draw.close(read[0].sum(axis=-1), 1, FLOAT32)  # what is read is the whole pattern


def test_a_model_drops_its_patterns_only_with_a_key_and_anew_in_each_layer():
    model, params = draw.model(attention_dropout=0.5)
    ids, key = draw.ids(2, 6), jax.random.key(0)
    plain = draw.logits(jf.build(draw.tiny()), params, ids)
    np.testing.assert_array_equal(draw.logits(model, params, ids), plain)
    dropped = draw.logits(model, params, ids, rngs={"dropout": key})
    assert abs(dropped - plain).max() > 0.01
    np.testing.assert_array_equal(draw.logits(model, params, ids, rngs={"dropout": key}), dropped)
    with pytest.raises(ValueError, match="no pattern to edit or to drop; run the whole text without a cache"):
        draw.logits(model, params, ids, cache=jf.init_cache(model.config, 2, 8), rngs={"dropout": key})


@pytest.mark.parametrize("rate", [1.0, 1.5, -0.1, float("nan")])
def test_a_rate_that_drops_everything_or_less_than_nothing_is_refused(rate):
    with pytest.raises(ValueError, match=r"dropout's rate=.* must be a number from 0 up to, but without, 1"):
        Dropout(jax.random.key(0), rate)

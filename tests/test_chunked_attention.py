"""Attention in blocks equals the reference in value and gradient, and does not hold or touch what it need not."""

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import BFLOAT16, FLOAT32, GRADIENT

import jaxformer as jf
from jaxformer.attention import attention, choose, chunked
from jaxformer.attention.grid import make_grid

SCALE = 0.4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 queries and 8 keys, so that short rows span several."""
    monkeypatch.setattr(chunked, "QUERIES", 4)
    monkeypatch.setattr(chunked, "KEYS", 8)


def packed(T):
    return np.where(np.arange(T) < T - 2, 1 + np.arange(T) // 5, 0)[None].repeat(2, axis=0)


def positions(T, S, kind):
    """Arrays and flags of a mask of the last T of S tokens."""
    kv = np.arange(S)[None].repeat(2, axis=0)
    q = kv[:, S - T :]
    padded = np.where(kv < [[S], [S - 3]], kv, -1)
    shuffled = np.random.default_rng(1).permutation(S)[None].repeat(2, axis=0)
    at = oracle.positions_from_segments(packed(S))
    return {
        "causal": ((q, kv), {"causal": True}),
        "full": ((q, padded), {}),
        "window": ((q, padded), {"causal": True, "window": 3}),
        "window to both sides": ((q, kv), {"window": 5}),
        "packed": ((at[:, S - T :], at, packed(S)[:, S - T :], packed(S)), {"causal": True}),
        "out of order": ((shuffled[:, :T], shuffled), {"causal": True}),
        "nothing allowed": ((q, np.full_like(kv, -1)), {}),
    }[kind]


KINDS = ("causal", "full", "window", "window to both sides", "packed", "out of order", "nothing allowed")
CASES = [
    *((kind, 13, 21, 4, 2, 1, None) for kind in KINDS),
    *(("causal", T, T, 2, 2, None, None) for T in (1, 7, 8, 9, 16)),
    ("window", 10, 10, 3, 1, 2, 2.0),
    ("packed", 12, 12, 6, 2, None, 2.0),
]


def inputs(rng, T, S, N, K, bias_rows, H=4, B=2):
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    q, k, v, dz = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    bias = None if bias_rows is None else jnp.asarray(rng.normal(size=(bias_rows, N, T, S)), jnp.float32)
    return (q, k, v, bias), dz


@pytest.mark.parametrize(("kind", "T", "S", "N", "K", "bias_rows", "softcap"), CASES)
def test_values_are_the_oracles_and_gradients_the_references(kind, T, S, N, K, bias_rows, softcap, rng):
    arrays, static = positions(T, S, kind)
    mask = jf.Mask(*(jnp.asarray(x) for x in arrays), **static)
    given, dz = inputs(rng, T, S, N, K, bias_rows)

    def run(implementation):
        def z(q, k, v, bias):
            return attention(q, k, v, mask, bias, scale=SCALE, softcap=softcap, implementation=implementation)

        return jax.jit(lambda *given: (z(*given), jax.vjp(z, *given)[1](dz)))(*given)

    (z, gradients), (_, expected) = run("chunked"), run("einsum")
    q, k, v, bias = given
    allowed = oracle.allowed(*arrays, **static)
    draw.close(z, oracle.attention(q, k, v, allowed, bias, scale=SCALE, softcap=softcap), FLOAT32)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        draw.close(ours, theirs, GRADIENT)


@pytest.mark.parametrize("T", [1, 7, 127, 128, 129, 192, 255])
def test_a_length_that_is_no_multiple_of_the_block_gives_the_mean_of_what_is_seen(T, monkeypatch):
    monkeypatch.setattr(chunked, "QUERIES", 128)
    monkeypatch.setattr(chunked, "KEYS", 128)
    zeros, v = jnp.zeros((1, T, 1, 1)), jnp.arange(T, dtype=jnp.float32)[None, :, None, None]
    full = chunked.chunked_attention(zeros, zeros, v, jf.Mask.full(T, T), scale=1.0)
    np.testing.assert_allclose(full[0, :, 0, 0], (T - 1) / 2, rtol=FLOAT32)
    causal = chunked.chunked_attention(zeros, zeros, v, jf.Mask.causal(T), scale=1.0)
    np.testing.assert_allclose(causal[0, :, 0, 0], np.arange(T) / 2, rtol=FLOAT32)


def test_a_bias_of_positions_is_the_same_as_its_array_in_value_and_gradient(rng):
    (q, k, v, _), dz = inputs(rng, 13, 13, 4, 2, None)
    slopes = jnp.asarray([0.5, 0.25, 0.125, 0.0625])
    at = jnp.arange(13)[None]

    def alibi(slopes):
        return jax.tree_util.Partial(
            lambda slopes, q, kv: -slopes[:, None, None] * (q[:, None, :, None] - kv[:, None, None]), slopes
        )

    def loss(slopes, as_array, implementation):
        bias = alibi(slopes)
        bias = bias(at, at) if as_array else bias
        z = attention(q, k, v, jf.Mask.causal(13), bias, scale=SCALE, implementation=implementation)
        return (z * dz).sum() / 100

    run = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    expected = run(slopes, True, "einsum")
    for implementation in ("einsum", "chunked"):
        value, gradient = run(slopes, False, implementation)
        draw.close(value, expected[0], FLOAT32)
        draw.close(gradient, expected[1], GRADIENT)
    assert np.abs(expected[1]).min() > 1e-4


@pytest.mark.parametrize("implementation", ["einsum", "chunked"])
def test_a_bias_may_be_a_numpy_array(implementation, rng):
    (q, k, v, bias), _ = inputs(rng, 5, 5, 2, 2, 1)
    ours, theirs = (
        attention(q, k, v, jf.Mask.causal(5), b, scale=SCALE, implementation=implementation)
        for b in (np.asarray(bias), bias)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_bfloat16_keeps_scores_and_sums_in_float32(rng):
    given, _ = inputs(rng, 40, 40, 2, 2, None)
    q, k, v = (x.astype(jnp.bfloat16) for x in given[:3])
    z = attention(q, k, v, jf.Mask.causal(40), scale=SCALE, implementation="chunked")
    assert z.dtype == jnp.bfloat16
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    draw.close(z, oracle.attention(*exact, np.tril(np.ones((1, 1, 40, 40), bool)), scale=SCALE), BFLOAT16)


def test_the_pattern_is_refused_with_the_implementation_that_has_it(rng):
    (q, k, v, _), _ = inputs(rng, 5, 5, 2, 2, None)
    with pytest.raises(ValueError, match=r"never holds the attention pattern.*einsum"):
        attention(q, k, v, jf.Mask.causal(5), scale=1.0, pattern_fn=lambda p: p, implementation="chunked")


def temporary_bytes(T, implementation):
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)

    def loss(q, k, v):
        return attention(q, k, v, jf.Mask.causal(T), scale=1.0, implementation=implementation).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_linearly_with_length_forward_and_backward(monkeypatch):
    monkeypatch.setattr(chunked, "QUERIES", 64)
    monkeypatch.setattr(chunked, "KEYS", 64)
    short, long = (temporary_bytes(T, "chunked") for T in (1024, 4096))
    assert long < 4.5 * short
    assert 10 * long < temporary_bytes(4096, "einsum")


@pytest.mark.parametrize("kind", ["causal", "window", "window to both sides", "packed", "out of order"])
def test_no_block_with_an_allowed_pair_is_left_out(kind):
    arrays, static = positions(29, 29, kind)
    mask = jf.Mask(*(jnp.asarray(x) for x in arrays), **static)
    grid = make_grid(mask, 4, 8)
    padded = np.zeros((2, 32, 32), bool)
    padded[:, :29, :29] = mask.dense()[:, 0]
    needed = padded.reshape(2, 8, 4, 4, 8).any(axis=(0, 2, 4))
    active = np.asarray(grid.active())
    assert not (needed & ~active).any()
    if kind in ("causal", "window", "window to both sides"):
        np.testing.assert_array_equal(active, needed)


@pytest.mark.parametrize(
    ("backend", "T", "needs_pattern", "chosen"),
    [
        ("cpu", 255, False, "einsum"),
        ("cpu", 256, False, "chunked"),
        ("cpu", 4096, True, "einsum"),
        ("tpu", 2047, False, "einsum"),
        ("gpu", 2048, False, "chunked"),
    ],
)
def test_auto_keeps_the_pattern_where_it_is_wanted_and_few_scores_in_memory(
    backend, T, needs_pattern, chosen, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert choose("auto", T * T, needs_pattern) == chosen
    assert choose("einsum", T * T, needs_pattern) == "einsum"


def test_a_long_row_is_chunked_by_itself_and_a_tapped_one_is_not():
    model, params = draw.model(max_len=256)
    tokens = draw.ids(1, 256)
    plain = str(jax.make_jaxpr(lambda p: model.apply({"params": p}, tokens))(params))
    assert "256,256]" not in plain
    _, read = draw.apply(model, {"params": params}, tokens, mutable=("intermediates",))
    pattern = read["intermediates"]["decoder"]["layers_0"]["attn"]["pattern"]
    draw.close(pattern.sum(axis=-1), np.ones(pattern.shape[:3]), FLOAT32)


def test_a_model_has_the_same_logits_and_gradients_with_either_implementation():
    tokens = draw.ids(2, 13)
    model, params = draw.model()
    other = jf.build(draw.tiny(attention="chunked"))

    def loss(params, model):
        return (model.apply({"params": params}, tokens) ** 2).mean()

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (value, gradients), (expected, reference) = run(params, other), run(params, model)
    draw.close(value, expected, FLOAT32)
    jax.tree.map(lambda x, y: draw.close(x, y, GRADIENT), gradients, reference)

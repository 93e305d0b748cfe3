"""Attention against the oracle over every kind of mask, head grouping, bias, cap and type; and closed forms.

In the closed forms q = k = 0, so that every visible key weighs the same and z is the mean of v over the visible keys.
"""

import dataclasses
import functools

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import BFLOAT16, FLOAT32

import jaxformer as jf
from jaxformer.attention import IMPLEMENTATIONS, attention, masked_softmax

TOLERANCE = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": BFLOAT16}
run = attend = jax.jit(attention, static_argnames=("scale", "softcap", "implementation"))

ROW = np.arange(5)
TWO = np.array([ROW, ROW])
LEFT, RIGHT = np.array([[-1, -1, 0, 1, 2], ROW]), np.array([[0, 1, 2, -1, -1], ROW])
PACKED = np.array([[1, 1, 1, 2, 2], [1, 2, 2, 3, 0]])
AT = oracle.positions_from_segments(PACKED)
MASKS = {
    "causal": ((TWO, TWO), {"causal": True}),
    "causal, one row for all": ((ROW[None], ROW[None]), {"causal": True}),
    "full": ((TWO, TWO), {}),
    "right padding": ((RIGHT, RIGHT), {}),
    "left padding": ((LEFT, LEFT), {"causal": True}),
    "packed": ((AT, AT, PACKED, PACKED), {"causal": True}),
    "causal window": ((TWO, TWO), {"causal": True, "window": 3}),
    "window to both sides": ((LEFT, LEFT), {"window": 2}),
    "last queries": ((TWO[:, 3:], RIGHT), {"causal": True}),
    "more queries than keys": ((TWO, RIGHT[:, 2:4]), {}),
}
HEADS = {"all": (4, 4), "grouped": (6, 2), "one": (3, 1)}


def make_mask(arrays, static):
    return jf.Mask(*(jnp.asarray(x) for x in arrays), **static)


def inputs(rng, T, S, N, K, H=4, dtype="float32", B=2):
    """q, k, v with values that the type holds exactly, for the oracle and for the package."""
    exact = [jnp.asarray(rng.normal(size=(B, *shape)), dtype) for shape in ((T, N, H), (S, K, H), (S, K, H))]
    return [np.asarray(x, np.float64) for x in exact], exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias_rows", [None, 1, 2])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_the_oracles(mask, heads, bias_rows, softcap, dtype, rng):
    arrays, static = MASKS[mask]
    (T, S), (N, K) = (x.shape[1] for x in arrays[:2]), HEADS[heads]
    exact, given = inputs(rng, T, S, N, K, dtype=dtype)
    bias = None if bias_rows is None else rng.normal(size=(bias_rows, N, T, S)).astype(np.float32)
    z = attention(
        *given, make_mask(arrays, static), None if bias is None else jnp.asarray(bias), scale=0.7, softcap=softcap
    )
    allowed = oracle.allowed(*arrays, **static)
    expected = oracle.attention(*exact, allowed, bias, scale=0.7, softcap=softcap)
    assert z.dtype == dtype
    draw.close(z, expected, TOLERANCE[dtype])
    empty = np.broadcast_to(~allowed.any(axis=(1, 3)), (2, T))
    np.testing.assert_array_equal(z[empty], 0)


EVERY = pytest.mark.parametrize("implementation", ["einsum", "chunked", "flash", "splash"])


def mean_of_visible(values, mask, T, N=1, dtype="float32", implementation="einsum"):
    v = jnp.asarray(values, dtype)
    v = v.reshape(1, len(v), -1, 1).repeat(2, axis=-1)
    S, K = v.shape[1:3]
    q, k = jnp.zeros((1, T, N, 2), dtype), jnp.zeros((1, S, K, 2), dtype)
    return run(q, k, v, mask, scale=1.0, implementation=implementation)[0, :, :, 0]


@EVERY
@pytest.mark.parametrize(("N", "K"), [(4, 2), (6, 2), (8, 1), (3, 3)])
def test_query_heads_share_key_value_heads_in_consecutive_groups(N, K, implementation):
    z = mean_of_visible([10.0 * np.arange(1, K + 1)] * 3, jf.Mask.full(1, 3), 1, N, implementation=implementation)
    np.testing.assert_array_equal(z[0], np.repeat(10.0 * np.arange(1, K + 1), N // K))


@EVERY
def test_a_causal_window_counts_the_token_itself(implementation):
    positions = jnp.arange(10)[None]
    mask = jf.Mask(positions, positions, causal=True, window=4, ordered=True)
    z = mean_of_visible(np.arange(10), mask, 10, implementation=implementation)
    draw.close(z[:, 0], [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5], FLOAT32)


@EVERY
def test_packed_documents_do_not_see_each_other(implementation):
    segments = jnp.asarray([[1, 1, 1, 2, 2]])
    positions = jnp.asarray([[0, 1, 2, 0, 1]])
    mask = jf.Mask(positions, positions, segments, segments, causal=True, ordered=True)
    z = mean_of_visible(np.arange(5), mask, 5, implementation=implementation)
    draw.close(z[:, 0], [0, 0.5, 1, 3, 3.5], FLOAT32)


@EVERY
@pytest.mark.parametrize("T", [127, 128, 129, 192])
def test_lanes_beyond_the_length_are_nobodys_keys(T, implementation):
    """Of 192 values, 95.5 is the mean; padding of a block of 128 that counts as keys would make it 71.625."""
    z = mean_of_visible(np.arange(T), jf.Mask.full(T, T), T, implementation=implementation)
    np.testing.assert_allclose(z[:, 0], (T - 1) / 2, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["einsum", "chunked", "flash"])
def test_causal_order_is_of_positions_and_not_of_a_corner(implementation):
    """One query of a longer text sees all before it; aligned to the first key, it would see that alone."""
    for t in range(4):
        mask = jf.Mask(jnp.asarray([[t]]), jnp.arange(5)[None], causal=True)
        z = mean_of_visible(np.arange(5) + 1, mask, 1, implementation=implementation)
        np.testing.assert_allclose(z[0, 0], 1 + t / 2, rtol=1e-6)


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_query_that_sees_nothing_gives_zero_and_harms_no_gradient(dtype, implementation):
    run = functools.partial(attend, implementation=implementation)
    q, k, v = (jnp.asarray(x, dtype)[None, :, None] for x in (np.zeros((2, 2)), np.zeros((2, 2)), [[1, 2], [3, 4]]))
    at, seen = jnp.arange(2)[None], jnp.asarray([[1, 1]])
    mask = jf.Mask(at, at, jnp.asarray([[1, 2]]), seen)  # the second query is of another document
    if implementation == "splash" and dtype == "float16":
        with pytest.raises(ValueError, match=r"not \['float16'\]; use implementation='chunked' or 'einsum'"):
            run(q, k, v, mask, scale=1.0)
        return

    def first(q, k, v):
        return run(q, k, v, mask, scale=1.0)[0, 0].sum()

    def both(q, k, v):
        return run(q, k, v, mask, scale=1.0).sum()

    np.testing.assert_array_equal(run(q, k, v, mask, scale=1.0)[0, :, 0], [[2, 3], [0, 0]])
    for loss in (first, both):
        dq, dk, dv = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
        np.testing.assert_array_equal(dv, np.full_like(v, 0.5))
        assert not dq.any()
        assert np.isfinite(dk).all()
    assert not jax.grad(first, argnums=1)(q, k, v).any()
    with jax.debug_nans(True):  # nor does a NaN arise in between
        attention(q, k, v, mask, scale=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hidden_keys_weigh_nothing_whatever_hides_them_and_however_often(dtype, rng):
    """Two pads before three tokens: hidden by the mask, by the lowest float32 as a bias, and by both at once."""
    exact, (q, k, v) = inputs(rng, 5, 5, 2, 2, dtype=dtype, B=1)
    plain = oracle.attention(*(x[:, 2:] for x in exact), np.tril(np.ones((1, 1, 3, 3), bool)), scale=0.5)
    positions = jnp.asarray(LEFT[:1])
    by_mask = jf.Mask(positions, positions, causal=True)
    lowest = jnp.where(by_mask.dense(), 0, jnp.finfo(jnp.float32).min) * jnp.ones((1, 2, 1, 1))
    for mask, bias in ((by_mask, None), (jf.Mask.full(5, 5), lowest), (by_mask, lowest)):
        z = run(q, k, v, mask, bias, scale=0.5)
        draw.close(z[:, 2:], plain, TOLERANCE[dtype])
        other = run(q, k + (positions < 0)[..., None, None], v.at[:, :2].set(7), mask, bias, scale=0.5)
        np.testing.assert_array_equal(other[:, 2:], z[:, 2:])
        gradients = jax.grad(lambda *x, m=mask, b=bias: run(*x, m, b, scale=0.5).sum(), argnums=(0, 1, 2))(q, k, v)
        assert all(np.isfinite(g).all() for g in [z, *gradients])


@pytest.mark.parametrize("implementation", ["einsum", "chunked", "flash"])
@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -np.inf])
def test_hidden_keys_stay_out_of_a_row_whose_bias_is_the_lowest(lowest, implementation):
    """All allowed keys have one score, so z is the mean of their values: all 1; under -inf nothing is seen."""
    q = jnp.zeros((1, 8, 1, 2))
    bias = jnp.full((1, 1, 8, 8), lowest, jnp.float32)
    z = run(q, q, jnp.ones_like(q), jf.Mask.causal(8), bias, scale=1.0, implementation=implementation)
    np.testing.assert_array_equal(z, np.full_like(z, 0 if np.isinf(lowest) else 1))


def test_scores_are_float32_under_bfloat16():
    """Scores of 256 and 257 are one number in bfloat16; the weights must be those of a difference of 1."""
    q, k = jnp.asarray([[[[16.0, 1.0]]]], jnp.bfloat16), jnp.asarray([[[[16.0, 0.0]], [[16.0, 1.0]]]], jnp.bfloat16)
    v = jnp.asarray([[[[0.0]], [[1.0]]]], jnp.bfloat16).repeat(2, axis=-1)
    z = run(q, k, v, jf.Mask.full(1, 2), scale=1.0)
    draw.close(z, np.full((1, 1, 1, 2), 1 / (1 + np.exp(-1))), BFLOAT16)


def test_large_scores_do_not_overflow(rng):
    exact, given = inputs(rng, 5, 5, 2, 2)
    z = run(*given, jf.Mask.causal(5), scale=1e4)
    draw.close(z, oracle.attention(*exact, np.tril(np.ones((1, 1, 5, 5), bool)), scale=1e4), FLOAT32)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_are_the_oracles_central_differences(softcap, rng):
    arrays, static = (LEFT[:1, 1:], LEFT[:1, 1:]), {"causal": True}
    exact, given = inputs(rng, 4, 4, 2, 1, H=2, B=1)
    exact.append(rng.normal(size=(1, 2, 4, 4)).astype(np.float32).astype(np.float64))
    weights = rng.normal(size=(1, 4, 2, 2))
    allowed, mask = oracle.allowed(*arrays, **static), make_mask(arrays, static)

    def loss(q, k, v, bias):
        return (run(q, k, v, mask, bias, scale=0.7, softcap=softcap) * jnp.asarray(weights, jnp.float32)).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*given, jnp.asarray(exact[3], jnp.float32))
    for i, gradient in enumerate(gradients):
        for at in np.ndindex(*gradient.shape):
            high, low = ([x.copy() for x in exact] for _ in range(2))
            high[i][at] += 1e-5
            low[i][at] -= 1e-5
            ends = [(oracle.attention(*x[:3], allowed, x[3], scale=0.7, softcap=softcap) * weights).sum()
                    for x in (high, low)]  # fmt: skip
            assert abs(gradient[at] - (ends[0] - ends[1]) / 2e-5) < FLOAT32, (i, at)


def test_the_softmax_is_over_allowed_keys_only(rng):
    scores = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    allowed = jnp.asarray(rng.integers(2, size=(4, 6)), bool).at[2].set(False).at[3].set(True)
    pattern = masked_softmax(scores, allowed)
    np.testing.assert_array_equal(pattern[~allowed], 0)
    draw.close(pattern.sum(axis=-1), allowed.any(axis=-1), FLOAT32)
    draw.close(pattern[3], oracle.softmax(scores[3]), FLOAT32)


def test_the_pattern_can_be_read_and_replaced(rng):
    exact, given = inputs(rng, 5, 5, 4, 2)
    expected = oracle.attention(*exact, np.tril(np.ones((1, 1, 5, 5), bool)), scale=0.5, with_pattern=True)
    seen = []
    z = attention(*given, jf.Mask.causal(5), scale=0.5, pattern_fn=lambda p: seen.append(p) or p)
    draw.close(z, expected[0], FLOAT32)
    draw.close(seen[0], expected[1], FLOAT32)
    first = jnp.zeros_like(seen[0]).at[..., 0].set(1)
    z = attention(*given, jf.Mask.causal(5), scale=0.5, pattern_fn=lambda _: first)
    np.testing.assert_array_equal(z, np.repeat(np.broadcast_to(given[2][:, :1], (2, 5, 2, 4)), 2, axis=2))


def test_an_implementation_of_the_users_is_used(monkeypatch):
    calls = []

    def zeros(q, k, v, mask, bias, *, scale, softcap, pattern_fn, dropout):
        calls.append((scale, softcap))
        return jnp.zeros_like(q)

    monkeypatch.setitem(IMPLEMENTATIONS, "zeros", zeros)
    q = jnp.ones((1, 3, 2, 4))
    assert not attention(q, q, q, jf.Mask.causal(3), scale=0.5, softcap=2.0, implementation="zeros").any()
    assert attention(q, q, q, jf.Mask.causal(3), scale=0.5, softcap=2.0).all()
    assert calls == [(0.5, 2.0)]
    model, params = draw.model(attention="zeros")
    calls.clear()
    jax.eval_shape(model.apply, {"params": params}, draw.ids(1, 3))
    assert calls == [(0.5, None)] * 2  # one for each layer


def test_an_unknown_implementation_is_refused():
    q = jnp.ones((1, 3, 2, 4))
    with pytest.raises(KeyError, match=r"'flush' is unknown; choose one of \['auto', 'einsum'"):
        attention(q, q, q, jf.Mask.causal(3), scale=0.5, implementation="flush")
    model, params = draw.model()
    with pytest.raises(KeyError, match="'flush' is unknown"):
        jax.eval_shape(
            jf.build(dataclasses.replace(model.config, attention="flush")).apply, {"params": params}, draw.ids(1, 3)
        )


@pytest.mark.parametrize(
    ("shapes", "mask", "message"),
    [
        ([(2, 3, 4), (2, 5, 2, 4), (2, 5, 2, 4)], (3, 5), r"q has shape \(2, 3, 4\); it must be \[batch, tokens"),
        ([(2, 3, 4, 4), (2, 5, 8), (2, 5, 2, 4)], (3, 5), r"k has shape \(2, 5, 8\)"),
        ([(2, 3, 4, 4), (2, 5, 2, 4), (5, 2, 4)], (3, 5), r"v has shape \(5, 2, 4\)"),
        ([(2, 3, 4, 4), (2, 5, 3, 4), (2, 5, 3, 4)], (3, 5), "4 query heads are not a multiple of 3 key/value heads"),
        ([(2, 3, 2, 4), (2, 5, 4, 4), (2, 5, 4, 4)], (3, 5), "2 query heads are not a multiple of 4 key/value heads"),
        ([(2, 3, 4, 4), (1, 5, 2, 4), (1, 5, 2, 4)], (3, 5), "must agree in batch, keys, kv heads and width"),
        ([(2, 3, 4, 4), (2, 5, 2, 6), (2, 5, 2, 6)], (3, 5), "must agree in batch, keys, kv heads and width"),
        ([(2, 3, 4, 4), (2, 5, 2, 4), (2, 4, 2, 4)], (3, 5), "must agree in batch, keys, kv heads and width"),
        ([(2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 4, 4)], (3, 5), "must agree in batch, keys, kv heads and width"),
        (
            [(2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 2, 4)],
            (5, 5),
            r"the mask is of positions \(1, 5\) x \(1, 5\), but there are 2 rows of 3 queries and 5",
        ),
        (
            [(2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 2, 4)],
            (3, 1),
            r"the mask is of positions \(1, 3\) x \(1, 1\), but there",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, mask, message, unchecked):
    with pytest.raises(ValueError, match=message):
        attention(*(jnp.ones(shape) for shape in shapes), jf.Mask.full(*mask), scale=1.0)


@pytest.mark.parametrize("rows", ["q_positions", "kv_positions", "segments"])
def test_a_mask_of_another_batch_is_refused(rows, unchecked):
    one, three = jnp.zeros((1, 4), int), jnp.zeros((3, 4), int)
    parts = {"q_positions": one, "kv_positions": one}
    parts |= {"q_segments": three, "kv_segments": three} if rows == "segments" else {rows: three}
    for B in (1, 2):
        q = jnp.ones((B, 4, 2, 4))
        with pytest.raises(ValueError, match="mask"):
            attention(q, q, q, jf.Mask(**parts), scale=1.0)


@pytest.mark.parametrize("shape", [(3, 2, 4, 4), (1, 1, 4, 4), (1, 2, 4, 1), (4, 4)])
def test_a_bias_of_another_shape_is_refused(shape, unchecked):
    q = jnp.ones((2, 4, 2, 4))
    with pytest.raises(ValueError, match="bias"):
        attention(q, q, q, jf.Mask.causal(4), jnp.zeros(shape), scale=1.0)


def bias_of(function, *arrays):
    return jax.tree_util.Partial(function, *arrays)


def test_queries_keys_and_values_are_of_one_floating_type(unchecked):
    q = jnp.ones((1, 4, 2, 4))
    for others in ({"k": "bfloat16"}, {"v": "float16"}, {"q": "int32", "k": "int32", "v": "int32"}):
        arrays = [q.astype(others.get(name, "float32")) for name in "qkv"]
        with pytest.raises(ValueError, match="cast them to one floating type"):
            attention(*arrays, jf.Mask.causal(4), scale=1.0)


@pytest.mark.parametrize("softcap", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_softcap_is_positive(softcap, unchecked):
    q = jnp.ones((1, 4, 2, 4))
    with pytest.raises(ValueError, match=r"softcap=.* must be a positive finite number"):
        attention(q, q, q, jf.Mask.causal(4), scale=1.0, softcap=softcap)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (jnp.zeros((1, 2, 4, 4), "int32"), "bias is int32; it is added to the scores and must be floating"),
        (np.ones((1, 2, 4, 4), bool), "bias is bool; it is added to the scores"),
        (lambda q, kv: jnp.zeros((1, 2, 4, 4)), r"is a plain function, .* jax.tree_util.Partial\(function, \*arrays\)"),
        (
            bias_of(lambda x, q, kv: jnp.zeros((1, 2, 4, 4)), jnp.arange(3)),
            "Partial has a leaf of type int32; gradients",
        ),
        (bias_of(lambda q, kv: jnp.zeros((1, 1, 4, 4))), r"bias has shape \(1, 1, 4, 4\)"),
        (bias_of(lambda q, kv: jnp.zeros((1, 2, 4, 4), "int32")), "bias is int32"),
    ],
)
@pytest.mark.parametrize("implementation", ["einsum", "chunked"])
def test_a_bias_without_gradients_is_refused(bias, message, implementation, unchecked):
    q = jnp.ones((2, 4, 2, 4))
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, jf.Mask.causal(4), bias, scale=1.0, implementation=implementation)


@pytest.mark.parametrize("implementation", ["einsum", "chunked", "flash"])
def test_a_bias_of_16_bits_is_added_in_float32(implementation, rng):
    """And its gradient comes back in its own type."""
    _, (q, k, v) = inputs(rng, 5, 5, 4, 2)
    bias = jnp.asarray(rng.normal(size=(2, 4, 5, 5)), jnp.bfloat16)

    def run(bias):
        return attention(q, k, v, jf.Mask.causal(5), bias, scale=0.5, implementation=implementation)

    draw.close(run(bias), run(bias.astype(jnp.float32)), FLOAT32)
    gradients = [jax.grad(lambda bias: (run(bias) ** 2).sum())(bias.astype(kind)) for kind in ("bfloat16", "float32")]
    assert [gradient.dtype for gradient in gradients] == ["bfloat16", "float32"]
    draw.close(gradients[0].astype(jnp.float32), gradients[1], 2**-8 * float(abs(gradients[1]).max()))

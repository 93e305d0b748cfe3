"""Linear attention equals its formula in value and gradient, as a whole row, by chunks, and token by token."""

from functools import partial

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import BFLOAT16, FLOAT32, GRADIENT

import jaxformer as jf
from jaxformer.attention import IMPLEMENTATIONS, Dropout, attention, linear
from jaxformer.attention.features import FEATURE_MAPS, elu_plus_one, random_features
from jaxformer.attention.linear import init_state, linear_attention, prefill, step

SCALE = 0.7


def arrays(T, padding="none", documents=1):
    """Positions and segments of two rows: the second is padded by a third, each holds documents of unlike lengths."""
    index, n = np.arange(T), T - T // 3
    first = np.zeros(T, int) + (documents * index**2) // T**2
    second = np.zeros(T, int) + (documents * index) // T
    real = np.stack([index >= 0, {"none": index >= 0, "right": index < n, "left": index >= T - n}[padding]])
    numbers = np.stack([first, second])
    segments = np.where(real, 1 + numbers - numbers.min(axis=1, where=real, initial=T, keepdims=True), 0)
    positions = oracle.positions_from_segments(segments)
    return (positions, positions) if documents == 1 else (positions, positions, segments, segments)


def made(arrays, **static):
    return jf.Mask(*(jnp.asarray(x) for x in arrays), ordered=True, **static)


def seen(arrays, causal):
    """The oracle's mask, in which padding asks for nothing."""
    return oracle.allowed(*arrays, causal=causal) & (arrays[0] >= 0)[:, None, :, None]


def inputs(rng, T, S, N, K, H=4, B=2, dtype=jnp.float32):
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    *qkv, dz = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return qkv, dz


def dense(q, k, v, allowed):
    """The formula with all [T S] weights, in float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    G = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
    weights = jnp.einsum("BTNM,BSNM->BNTS", elu_plus_one(SCALE * q), elu_plus_one(k)) * allowed
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("BNTS,BSNH->BTNH", weights / jnp.where(total == 0, 1, total), v)


def run(f, qkv, dz):
    return jax.jit(lambda *qkv: (f(*qkv), jax.vjp(f, *qkv)[1](dz)))(*qkv)


GRID = [
    *((causal, T, 4, 2, padding, 3) for causal in (True, False) for padding in ("none", "left", "right") for T in (7,)),
    *((causal, T, 4, 2, "right", 1) for causal in (True, False) for T in (1, 127, 128, 129)),
    *((causal, T, 3, 1, "left", 3) for causal in (True, False) for T in (128, 129, 192)),
    (True, 192, 2, 2, "left", 1),
    (False, 192, 2, 2, "left", 1),
]


@pytest.mark.parametrize(("causal", "T", "N", "K", "padding", "documents"), GRID)
def test_values_are_the_oracles_and_gradients_the_formulas(causal, T, N, K, padding, documents, rng):
    rows = arrays(T, padding, documents)
    allowed, (qkv, dz) = seen(rows, causal), inputs(rng, T, T, N, K)
    z, gradients = run(partial(linear_attention, mask=made(rows, causal=causal), scale=SCALE), qkv, dz)
    _, expected = run(partial(dense, allowed=allowed), qkv, dz)
    draw.close(z, oracle.linear_attention(*qkv, allowed, scale=SCALE), FLOAT32)
    for ours, theirs in zip(gradients, expected, strict=True):
        draw.close(ours, theirs, GRADIENT)
    assert not np.asarray(z)[rows[0] < 0].any()


@st.composite
def packed_rows(draw):
    """Rows of documents with holes of padding anywhere, which may carry any number."""
    T = 11
    numbers = np.asarray([sorted(draw(st.lists(st.integers(-2, 5), min_size=T, max_size=T))) for _ in range(2)])
    real = np.asarray(draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=2, max_size=2)))
    at = np.where(real, np.arange(T) - np.stack([np.searchsorted(row, row) for row in numbers]), -1)
    segments = np.where(real, numbers, draw(st.integers(-3, 6)))
    return at, at, segments, segments


@partial(jax.jit, static_argnums=2)
def by_chunks_of_three(qkv, arrays, causal):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "CHUNK", 3)
        return linear_attention(*qkv, made(arrays, causal=causal), scale=SCALE)


@given(packed_rows(), st.booleans())
@settings(max_examples=60)
def test_documents_may_lie_across_chunks_in_any_way_and_have_holes(rows, causal):
    qkv, _ = inputs(np.random.default_rng(0), 11, 11, 2, 1)
    z = by_chunks_of_three(qkv, tuple(jnp.asarray(x, jnp.int32) for x in rows), causal)
    draw.close(z, oracle.linear_attention(*qkv, seen(rows, causal), scale=SCALE), FLOAT32)


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_keeps_features_and_sums_in_float32(causal, rng):
    rows = arrays(192, "left", 3)
    allowed, (qkv, dz) = seen(rows, causal), inputs(rng, 192, 192, 4, 2, dtype=jnp.bfloat16)
    z, gradients = run(partial(linear_attention, mask=made(rows, causal=causal), scale=SCALE), qkv, dz)
    exact = [np.asarray(x, np.float64) for x in qkv]
    _, expected = run(partial(dense, allowed=allowed), [jnp.asarray(x, jnp.float32) for x in exact], dz.astype("f4"))
    draw.close(z, oracle.linear_attention(*exact, allowed, scale=SCALE), BFLOAT16)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.dtype == z.dtype == jnp.bfloat16
        draw.close(ours, theirs, BFLOAT16)


def test_a_long_bfloat16_row_does_not_stop_counting():
    """In bfloat16 a sum of ones stays at 256."""
    T = 1024
    zeros, v = jnp.zeros((1, T, 1, 1), jnp.bfloat16), jnp.ones((1, T, 1, 1), jnp.bfloat16)
    _, state = prefill(zeros, zeros, v, jf.Mask.causal(T), scale=1.0)
    assert float(state.total[0, 0, 0]) == float(state.sums[0, 0, 0, 0]) == T


@pytest.mark.parametrize("T", [1, 127, 128, 129, 192])
def test_equal_features_give_the_mean_of_what_is_seen(T):
    zeros, v = jnp.zeros((1, T, 1, 1)), jnp.arange(T, dtype=jnp.float32)[None, :, None, None]
    full = linear_attention(zeros, zeros, v, jf.Mask.full(T, T), scale=1.0)
    np.testing.assert_allclose(full[0, :, 0, 0], (T - 1) / 2, rtol=FLOAT32)
    causal = linear_attention(zeros, zeros, v, jf.Mask.causal(T), scale=1.0)
    np.testing.assert_allclose(causal[0, :, 0, 0], np.arange(T) / 2, rtol=FLOAT32)


def test_two_sided_attention_to_other_keys_takes_them_in_any_order(rng):
    qkv, _ = inputs(rng, 5, 9, 4, 2)
    kv = np.where(np.arange(9) % 4 == 1, -1, np.arange(9)[::-1])[None]
    rows = (np.arange(5)[None], kv)
    z = linear_attention(*qkv, jf.Mask(*map(jnp.asarray, rows)), scale=SCALE)
    draw.close(z, oracle.linear_attention(*qkv, oracle.allowed(*rows), scale=SCALE), FLOAT32)


@pytest.mark.parametrize("causal", [True, False])
def test_where_nothing_is_seen_the_result_is_0_with_finite_gradients(causal, rng):
    qkv, dz = inputs(rng, 5, 5, 2, 1)
    nothing = np.full((1, 5), -1)
    z, gradients = run(partial(linear_attention, mask=made((nothing, nothing), causal=causal), scale=1.0), qkv, dz)
    assert not z.any()
    assert all(not gradient.any() for gradient in gradients)
    queries, _ = inputs(rng, 5, 5, 2, 1)
    no_weights = partial(linear_attention, mask=jf.Mask.full(5, 5), scale=1.0, feature_map=jax.nn.relu)
    z, gradients = run(no_weights, [-abs(queries[0]), *queries[1:]], dz)
    assert not z.any()
    assert all(not gradient.any() for gradient in gradients)


# Token by token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "feature_map"), [(0, "elu"), (1, "elu"), (7, "relu"), (10, "softmax")])
def test_a_prefix_at_once_and_then_token_by_token_is_the_whole(start, feature_map, rng, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 4)
    (qkv, _), rows, how = (
        inputs(rng, 11, 11, 4, 2),
        arrays(11, "left"),
        {"scale": SCALE, "feature_map": FEATURE_MAPS[feature_map]},
    )
    whole, last = prefill(*qkv, made(rows, causal=True), **how)
    state, parts = init_state(2, 2, 4), []
    if start:
        z, state = prefill(*(x[:, :start] for x in qkv), made([x[:, :start] for x in rows], causal=True), **how)
        parts = [z]
    for t in range(start, 11):
        token = [x[:, t : t + 1] for x in qkv]
        z, state = jax.jit(partial(step, **how))(state, *token, positions=jnp.asarray(rows[0][:, t : t + 1]))
        parts.append(z)
    draw.close(jnp.concatenate(parts, axis=1), whole, FLOAT32)
    jax.tree.map(lambda ours, theirs: draw.close(ours, theirs, FLOAT32), state, last)


def test_a_state_has_one_size_and_a_token_without_positions_counts(rng):
    (q, k, v), _ = inputs(rng, 1, 1, 4, 2)
    state = init_state(2, 2, 4, feature_map=random_features(jax.random.key(0), 4, 6))
    assert [x.shape for x in jax.tree.leaves(state)] == [(2, 2, 6, 4), (2, 2, 6)]
    z, state = step(init_state(2, 2, 4), q, k, v, scale=SCALE)
    draw.close(z, jnp.repeat(v, 2, axis=2), FLOAT32)
    draw.close(state.total, oracle.elu_plus_one(k[:, 0]), FLOAT32)


def test_of_packed_rows_the_state_is_the_last_documents(rng, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 4)
    qkv, _ = inputs(rng, 13, 13, 2, 2)
    segments = np.repeat([[1, 2, 5, 0]], [3, 4, 4, 2], axis=1).repeat(2, axis=0)
    positions = oracle.positions_from_segments(segments)
    mask = made((positions, positions, segments, segments), causal=True)
    _, state = prefill(*qkv, mask, scale=SCALE)
    _, alone = prefill(*(x[:, 7:11] for x in qkv), jf.Mask.causal(4), scale=SCALE)
    jax.tree.map(lambda ours, theirs: draw.close(ours, theirs, FLOAT32), state, alone)


# Features -------------------------------------------------------------------------------------------------------------


def test_elu_plus_one_is_exact_far_below_0_and_smooth_at_0():
    x = jnp.asarray([-80.0, -20.0, -1.0, 0.0, 3.0, 200.0])
    np.testing.assert_allclose(elu_plus_one(x), [*np.exp([-80.0, -20.0, -1.0]), 1.0, 4.0, 201.0], rtol=1e-6)
    gradient = jax.grad(lambda x: elu_plus_one(x).sum())(x)
    np.testing.assert_allclose(gradient, [*np.exp([-80.0, -20.0, -1.0]), 1.0, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_feature_map_is_taken_as_it_is(name, rng):
    qkv, _ = inputs(rng, 6, 6, 2, 2)
    theirs = {"elu": oracle.elu_plus_one, "relu": lambda x: np.maximum(x, 0), "softmax": oracle.softmax}[name]
    z = linear_attention(*qkv, jf.Mask.causal(6), scale=SCALE, feature_map=FEATURE_MAPS[name])
    draw.close(z, oracle.linear_attention(*qkv, np.tril(np.ones((6, 6), bool)), scale=SCALE, feature_map=theirs), 1e-5)


def test_random_features_estimate_softmax_attention_with_an_error_of_one_over_their_root(rng):
    """16 times the features is a quarter of the error."""
    (q, k, v), _ = inputs(rng, 16, 16, 2, 2)
    q, k = 0.3 * q, 0.3 * k
    exact = oracle.attention(q, k, v, np.tril(np.ones((1, 1, 16, 16), bool)), scale=SCALE)

    @partial(jax.jit, static_argnums=1)
    def estimates(keys, features):
        def one(key):
            phi = random_features(key, 4, features)
            return linear_attention(q, k, v, jf.Mask.causal(16), scale=SCALE, feature_map=phi)

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(0), 40)
    few, many = (np.sqrt(np.square(estimates(keys, M) - exact).mean()) for M in (64, 1024))
    assert 3.2 < few / many < 4.8
    assert many < 0.02


# Cost -----------------------------------------------------------------------------------------------------------------


def temporary_bytes(T, f):
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    loss = jax.grad(lambda q, k, v: f(q, k, v).sum(), argnums=(0, 1, 2))
    return jax.jit(loss).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["causal", "full", "packed"])
def test_memory_grows_linearly_with_length_forward_and_backward(kind):
    def mask(T):
        at, one = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
        return {"causal": jf.Mask.causal(T), "full": jf.Mask.full(T, T), "packed": jf.Mask(at, at, one, one)}[kind]

    short, long = (temporary_bytes(T, partial(linear_attention, mask=mask(T), scale=1.0)) for T in (1024, 4096))
    assert long < 4.5 * short
    # Less a token than one set of products with its chunk, for 2 heads in 2 directions: none is kept for the gradients.
    assert (long - short) / 3072 < 2 * 2 * 4 * linear.CHUNK
    assert 10 * long < temporary_bytes(4096, partial(attention, mask=mask(4096), scale=1.0, implementation="einsum"))


# In a model -----------------------------------------------------------------------------------------------------------


def test_a_model_of_linear_attention_is_causal_and_learns(monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 4)
    monkeypatch.setitem(IMPLEMENTATIONS, "linear", linear_attention)
    softmax_model, params = draw.model()
    model, mask, ids = jf.build(draw.tiny(attention="linear")), jf.Mask.causal(13), draw.ids(2, 13)
    logits = draw.logits(model, params, ids, mask=mask)
    np.testing.assert_array_equal(draw.logits(model, params, ids), logits)
    changed = draw.logits(model, params, ids.at[:, 9].set((ids[:, 9] + 1) % 29), mask=mask)
    np.testing.assert_array_equal(changed[:, :9], logits[:, :9])
    assert (abs(changed - logits)[:, 9:].max(axis=-1) > 1e-3).all()
    assert abs(draw.logits(softmax_model, params, ids) - logits).max() > 1e-2

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        log_p = jax.nn.log_softmax(model.apply({"params": params}, ids, mask=mask)[:, :-1])
        return -jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1).mean()

    first, gradients = loss(params)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(gradients))
    for _ in range(5):
        params = jax.tree.map(lambda x, gradient: x - 0.1 * gradient, params, gradients)
        last, gradients = loss(params)
    assert last < first - 0.5


def test_the_package_does_not_offer_it_as_the_same_function():
    assert "linear" not in IMPLEMENTATIONS


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias": jnp.zeros((1, 2, 5, 5))}, "bias: it has no scores to add one to; use 'einsum' or 'chunked'"),
        ({"bias": lambda q, kv: q}, "bias: it has no scores to add one to; use 'einsum' or 'chunked'"),
        ({"softcap": 2.0}, "softcap: it has no scores to bound; use 'einsum' or 'chunked'"),
        ({"pattern_fn": lambda p: p}, "pattern_fn: the pattern never exists in it; use 'einsum'"),
        (
            {"dropout": Dropout(jax.random.key(0), 0.1)},
            "dropout: the pattern never exists in it; use 'einsum' or 'chunked'",
        ),
        ({"window": 3}, "window: a sum of keys cannot lose the oldest; use 'einsum' or 'chunked'"),
        ({"prefix": jnp.full((1, 1), 2)}, "prefix: its sums follow the order of the tokens; use 'einsum' or 'chunked'"),
    ],
)
def test_what_it_cannot_honour_is_refused(arguments, message, rng):
    qkv, _ = inputs(rng, 5, 5, 2, 2)
    at, of_mask = jnp.arange(5)[None], {name: arguments.pop(name, None) for name in ("window", "prefix")}
    mask = jf.Mask(at, at, causal=True, ordered=True, **of_mask)
    with pytest.raises(ValueError, match=r"^") as raised:
        linear_attention(*qkv, mask, **arguments, scale=1.0)
    assert str(raised.value) == f"linear attention cannot honour {message}"


ORDER = (
    "linear attention needs the promise that positions count up along the row; make the causal mask with ordered=True "
    "if they do, or use 'einsum' or 'chunked'"
)
ROW = (
    "linear attention of 3 queries to 5 keys can be neither causal nor packed, for its sums run along one row; add "
    "single tokens with `step`, or use 'einsum' or 'chunked'"
)
SAME = (
    "linear attention sums along the row: queries and keys must be the same tokens, and the documents of a row must "
    "have rising segment numbers; number them 1, 2, 3, ..., or use 'einsum' or 'chunked'"
)
SIZES = "the mask is of positions (1, 5) x (1, 5), but there are 3 queries and 5 keys"


def of(q, kv, *segments, **static):
    return jf.Mask(*(jnp.asarray([x]) for x in (q, kv, *segments)), **static)


FIVE = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("T", "mask", "message"),
    [
        (5, of(FIVE, FIVE, causal=True), ORDER),
        (3, of([2, 3, 4], FIVE, causal=True, ordered=True), ROW),
        (3, of([2, 3, 4], FIVE, [1, 1, 1], [1] * 5), ROW),
        (5, of([3, 4, 5, 6, 7], FIVE, causal=True, ordered=True), SAME),
        (5, of(FIVE, FIVE, [1, 1, 2, 2, 2], [1] * 5), SAME),
        (5, of(FIVE, FIVE, [1, 2, 2, 1, 1], [1, 2, 2, 1, 1]), SAME),
        (5, of(FIVE, FIVE, [2, 2, 1, 1, 1], [2, 2, 1, 1, 1], causal=True, ordered=True), SAME),
        (3, of(FIVE, FIVE), SIZES),
    ],
)
def test_a_mask_whose_order_is_not_the_rows_is_refused(T, mask, message, rng):
    qkv, _ = inputs(rng, T, 5, 2, 2)
    with pytest.raises(ValueError, match=r"^") as raised:
        linear_attention(*qkv, mask, scale=1.0)
    assert str(raised.value) == message
    with pytest.raises(ValueError, match=r"^") as raised:  # known masks are known under jit too
        jax.jit(lambda *qkv: linear_attention(*qkv, mask, scale=1.0))(*qkv)
    assert str(raised.value) == message


def test_only_a_causal_row_has_a_state_after_it(rng):
    qkv, _ = inputs(rng, 5, 5, 2, 2)
    with pytest.raises(ValueError, match=r"^only a causal mask has a state after its last token; use linear_attention"):
        prefill(*qkv, jf.Mask.full(5, 5), scale=1.0)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_out_of_order_that_is_not_known_is_nan_and_its_neighbours_are_not(causal, rng):
    qkv, _ = inputs(rng, 5, 5, 2, 2)
    segments = np.asarray([[1, 1, 2, 2, 1], [1, 1, 2, 2, 0]])
    positions = np.asarray([FIVE, [0, 1, 0, 1, -1]])
    mask = made((positions, positions, segments, segments), causal=causal)
    z = jax.jit(lambda qkv, mask: linear_attention(*qkv, mask, scale=SCALE))(qkv, mask)
    assert np.isnan(z[0]).all()
    rows = (positions[1:], positions[1:], segments[1:], segments[1:])
    expected = oracle.linear_attention(*(x[1:] for x in qkv), seen(rows, causal), scale=SCALE)
    draw.close(z[1:], expected, FLOAT32)

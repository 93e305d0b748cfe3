import re

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.cache import KINDS, append_positions, cache_bytes, crop, store, take_rows
from jaxformer.storage import KV

CONFIG = draw.tiny(num_layers=3)
L, B, K, H = 3, 2, 2, 4


def written(cache, positions, new):
    """A cache after these tokens: new k and v are [L B T K H]."""
    cache = append_positions(cache, positions)
    for layer in range(L):
        cache, view = store(cache, layer, KV(new.k[layer], new.v[layer]), positions)
        assert view.layer == layer
    return cache


compiled = jax.jit(written)


def tokens(T, seed=0):
    k, v = np.random.default_rng(seed).normal(size=(2, L, B, T, K, H)).astype(np.float32)
    return np.tile(np.arange(T), (B, 1)), KV(k, v)


def slots(new):
    """[L B T K H] as the cache holds it, [L B K T H]."""
    return np.swapaxes(new, 2, 3)


def test_a_new_cache_holds_nothing():
    cache = jf.init_cache(CONFIG, B, 7)
    assert cache.capacity == 7
    assert cache.length == 0
    np.testing.assert_array_equal(cache.positions, np.full((B, 7), -1))
    for stored in jax.tree.leaves(cache.layers):
        assert stored.shape == (L, B, K, 7, H)
        assert not stored.any()


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, "bfloat16"), ("float32", "float32"), (jnp.bfloat16, "bfloat16")]
)
def test_keys_and_values_have_the_compute_type_unless_told(dtype, expected):
    cache = jf.init_cache(draw.tiny(dtype="bfloat16"), 1, 4, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.layers)} == {jnp.dtype(expected)}
    assert {cache.positions.dtype, cache.length.dtype} == {jnp.dtype("int32")}


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4))
@settings(deadline=None, max_examples=20)
def test_chunks_of_any_size_stand_one_after_the_other(chunks):
    total = sum(chunks)
    positions, new = tokens(total)
    cache, start = jf.init_cache(CONFIG, B, 16), 0
    for size in chunks:
        chunk = jax.tree.map(lambda x, at=slice(start, start + size): x[:, :, at], new)
        cache, start = compiled(cache, positions[:, start : start + size], chunk), start + size
    assert cache.length == total
    np.testing.assert_array_equal(cache.positions[:, :total], positions)
    np.testing.assert_array_equal(cache.positions[:, total:], -1)
    for stored, given_ in ((cache.layers.self_kv.k, new.k), (cache.layers.self_kv.v, new.v)):
        np.testing.assert_array_equal(stored[:, :, :, :total], slots(given_))
        assert not stored[:, :, :, total:].any()


def test_padding_takes_a_slot_without_a_position():
    positions = jnp.asarray([[-1, 0, 1], [0, 1, -1]])
    cache = append_positions(jf.init_cache(CONFIG, B, 4), positions)
    np.testing.assert_array_equal(cache.positions, [[-1, 0, 1, -1], [0, 1, -1, -1]])
    assert cache.length == 3


def test_the_layer_written_may_be_a_traced_number():
    positions, new = tokens(2)
    cache = append_positions(jf.init_cache(CONFIG, B, 4), jnp.asarray(positions))

    @jax.jit
    def one(cache, layer):
        return store(cache, layer, KV(jnp.asarray(new.k[1]), jnp.asarray(new.v[1])), jnp.asarray(positions))[0]

    k = one(cache, jnp.asarray(1)).layers.self_kv.k
    np.testing.assert_array_equal(k[1, :, :, :2], slots(new.k)[1])
    assert not k[jnp.asarray([0, 2])].any()


@pytest.mark.parametrize(("held", "more", "capacity"), [(8, 1, 8), (6, 4, 8), (0, 9, 8), (1, 1, 1)])
def test_more_tokens_than_slots_is_an_error_that_names_both_numbers(held, more, capacity):
    cache = jf.init_cache(CONFIG, B, capacity)
    if held:
        cache = append_positions(cache, jnp.asarray(tokens(held)[0]))
    with pytest.raises(ValueError, match=rf"\b{held + more}\b.*capacity of {capacity}\b"):
        append_positions(cache, jnp.asarray(tokens(more)[0]))


def test_more_new_tokens_than_slots_is_an_error_under_jit_too():
    with pytest.raises(ValueError, match="5 tokens are over the cache's capacity of 4; make it larger"):
        compiled(jf.init_cache(CONFIG, B, 4), *tokens(5))


@pytest.mark.parametrize(("held", "more"), [(4, 1), (2, 3)])
def test_an_overflow_under_jit_stores_nan_and_never_a_number(held, more):
    _, new = tokens(held + more)
    first, rest = (jax.tree.map(lambda x, at=at: x[:, :, at], new) for at in (slice(held), slice(held, None)))
    cache = compiled(jf.init_cache(CONFIG, B, 4), tokens(held)[0], first)
    over = compiled(cache, tokens(more)[0] + held, rest)
    for stored, kept in zip(jax.tree.leaves(over.layers), jax.tree.leaves(cache.layers), strict=True):
        assert np.isnan(stored[:, :, :, 4 - more :]).all()
        np.testing.assert_array_equal(stored[:, :, :, : 4 - more], kept[:, :, :, : 4 - more])
    again = compiled(over, tokens(1)[0] + held + more, jax.tree.map(lambda x: x[:, :, :1], new))
    assert np.isnan(again.layers.self_kv.v[:, :, :, 3]).all()  # and so it stays


def test_writing_in_a_loop_copies_no_cache():
    """The whole cache is updated where it lies: a copy of it per token would cost more than the token."""
    capacity = 4096

    def loop(cache, new):
        def token(cache, position):
            return written(cache, jnp.full((B, 1), position), new), None

        return jax.lax.scan(token, cache, jnp.arange(8))[0]

    shapes = jax.eval_shape(lambda: (jf.init_cache(CONFIG, B, capacity), tokens(1)[1]))
    text = jax.jit(loop, donate_argnums=0).lower(*shapes).compile().as_text()
    assert f"{capacity},{H}]" in text
    assert not re.findall(rf"= f32\[[\d,]*{capacity},{H}\]\S* copy\(", text)


@pytest.mark.parametrize(("batch", "capacity"), [(0, 4), (2, 0), (2, -1)])
def test_a_cache_for_nothing_is_refused(batch, capacity):
    with pytest.raises(ValueError, match=f"batch={batch} and capacity={capacity} holds nothing"):
        jf.init_cache(CONFIG, batch, capacity)


def test_an_unknown_kind_is_refused():
    with pytest.raises(KeyError, match=re.escape(f"'sparse' is unknown; choose one of {list(KINDS)}")):
        jf.init_cache(CONFIG, 1, 4, kind="sparse")


@pytest.mark.parametrize("dtype", ["int8", "int32", bool])
def test_a_type_that_would_truncate_is_refused(dtype):
    with pytest.raises(ValueError, match=f"cache type {jnp.dtype(dtype)} .* floating"):
        jf.init_cache(CONFIG, 1, 4, dtype=dtype)


# Rings ----------------------------------------------------------------------------------------------------------------

WINDOW = 4
RING = draw.tiny(num_layers=L, window=(WINDOW, 2, 3))


@given(
    st.lists(st.sampled_from([1, 2, 5]), min_size=1, max_size=5),
    st.lists(st.integers(0, 2), min_size=B, max_size=B),
    st.integers(0, 99),
)
@settings(max_examples=30)
def test_a_ring_holds_the_last_tokens_of_every_row_however_they_come(chunks, gaps, seed):
    total = sum(chunks)
    _, new = tokens(total, seed)
    # Row b has gaps[b] tokens of padding, somewhere.
    rng = np.random.default_rng(seed)
    real = np.array([rng.permutation(total) >= min(gap, total) for gap in gaps])
    positions = np.where(real, np.cumsum(real, axis=1) - 1, -1)
    cache, start = jf.init_cache(RING, B, 64, kind="ring"), 0
    for size in chunks:
        at = slice(start, start + size)
        cache = compiled(cache, positions[:, at], jax.tree.map(lambda x, at=at: x[:, :, at], new))
        start += size
    assert cache.is_ring
    assert (cache.capacity, int(cache.length)) == (WINDOW, total)
    for row in range(B):
        last = range(max(0, real[row].sum() - WINDOW), real[row].sum())
        assert sorted(p for p in cache.positions[row].tolist() if p >= 0) == list(last)
        for position in last:
            (token,) = np.flatnonzero(positions[row] == position)
            np.testing.assert_array_equal(
                cache.layers.self_kv.v[:, row, :, position % WINDOW], new.v[:, row, token], strict=True
            )


@pytest.mark.parametrize("capacity", [WINDOW - 1, WINDOW, 100])
def test_a_ring_is_never_larger_than_the_window_nor_smaller_than_the_text(capacity):
    cache = jf.init_cache(RING, B, capacity, kind="ring")
    assert cache.capacity == min(capacity, WINDOW)
    assert cache.is_ring == (capacity > WINDOW)
    if not cache.is_ring:
        with pytest.raises(ValueError, match=f"over its capacity of {capacity}"):
            append_positions(append_positions(cache, jnp.asarray(tokens(capacity)[0])), jnp.asarray(tokens(1)[0]))


@pytest.mark.parametrize("window", [None, (4, None)])
def test_a_ring_without_a_window_is_refused(window):
    with pytest.raises(ValueError, match=r"a ring forgets what no window reaches, but window=.* dense or int8"):
        jf.init_cache(draw.tiny(window=window), 1, 8, kind="ring")


def test_a_mask_over_a_ring_is_refused():
    model, params = draw.model(window=2)
    cache = jf.init_cache(model.config, 1, 8, kind="ring")
    with pytest.raises(ValueError, match="slots of a ring change hands"):
        model.apply({"params": params}, draw.ids(1, 2), mask=jf.Mask.causal(2), cache=cache)


# 8 bits ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
@settings(max_examples=20)
def test_int8_is_off_by_at_most_half_a_step_of_its_head(seed, size):
    positions, new = tokens(5, seed)
    new = jax.tree.map(lambda x: x * np.float32(size), new)
    new.k[0, 0, 1] = 0
    cache = compiled(jf.init_cache(CONFIG, B, 8, kind="int8"), positions, new)
    assert {leaf.dtype for leaf in (cache.layers.self_kv.k, cache.layers.self_kv.v)} == {jnp.dtype("int8")}
    read = cache.layers.self_kv.decoded(jnp.float32)
    for ours, given_ in ((read.k, new.k), (read.v, new.v)):
        step = np.abs(slots(given_)).max(axis=-1, keepdims=True) / 127
        assert (np.abs(ours[:, :, :, :5] - slots(given_)) <= step * 0.5001).all()
        assert not ours[:, :, :, 5:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_unusable_in_int8(bad):
    positions, new = tokens(3)
    new.v[0, 0, 1, 0, 2] = bad
    read = compiled(jf.init_cache(CONFIG, B, 8, kind="int8"), positions, new).layers.self_kv.decoded(jnp.float32)
    assert np.isnan(read.v[0, 0, 0, 1]).all()
    assert np.isfinite(np.delete(read.v[0, 0, 0], 1, axis=0)).all()


def test_an_overflow_under_jit_is_nan_in_int8_too():
    _, new = tokens(5)
    first, rest = (jax.tree.map(lambda x, at=at: x[:, :, at], new) for at in (slice(4), slice(4, None)))
    cache = compiled(jf.init_cache(CONFIG, B, 4, kind="int8"), tokens(4)[0], first)
    over = compiled(cache, tokens(1)[0] + 4, rest)
    assert np.isnan(over.layers.self_kv.decoded(jnp.float32).v[:, :, :, 3]).all()


# Sizes, and what is done between calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_cache_are_the_formula_and_those_of_the_arrays(kind, dtype):
    batch, length, slots_ = 3, 10, WINDOW if kind.endswith("ring") else 10
    per_head = (H + 4) if kind.startswith("int8") else H * jnp.dtype(dtype).itemsize  # a number each, and a scale
    formula = 2 * L * K * slots_ * batch * per_head
    places = 4 * batch * slots_ + 4
    assert cache_bytes(RING, batch, length, kind, dtype=dtype) == formula + places
    real = jf.init_cache(RING, batch, length, kind=kind, dtype=dtype)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(real)) == formula + places
    pair = draw.tiny(architecture="encoder_decoder", num_layers=1, num_decoder_layers=L, window=WINDOW)
    more = cache_bytes(pair, batch, length, kind, dtype=dtype, source_len=7)
    assert more == formula + places + 2 * L * K * 7 * batch * per_head + 4 * batch * 7


@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_a_cropped_cache_goes_on_as_if_the_rest_had_never_been(kind):
    model, params = draw.model()
    empty, ids, other = jf.init_cache(model.config, 2, 9, kind=kind), draw.ids(2, 8), draw.ids(2, 8, seed=1)
    _, cache = draw.logits(model, params, ids[:, :4], cache=empty)
    straight, _ = draw.logits(model, params, ids[:, 4:], cache=cache)
    _, astray = draw.logits(model, params, other[:, 4:], cache=cache)
    back = crop(astray, 4)
    assert (back.length, back.capacity) == (4, 9)
    np.testing.assert_array_equal(back.positions, cache.positions)
    again, _ = draw.logits(model, params, ids[:, 4:], cache=back)
    np.testing.assert_array_equal(again, straight)
    np.testing.assert_array_equal(jax.jit(crop)(astray, 4).positions, cache.positions)


def test_a_crop_that_cannot_be_exact_is_refused():
    with pytest.raises(ValueError, match="a ring has overwritten older tokens"):
        crop(jf.init_cache(RING, 1, 8, kind="ring"), 0)
    cache = append_positions(jf.init_cache(CONFIG, 1, 8), jnp.arange(3)[None])
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"length={length} must be from 0 to 3"):
            crop(cache, length)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_cache_are_rows_of_every_array_of_it(kind):
    model, params = draw.model(window=WINDOW)
    ids, rows = draw.ids(3, 8), jnp.asarray([2, 0, 2, 1])
    positions = jnp.asarray([range(6), [-1, *range(5)], [0, 1, 2, 3, -1, -1]])
    step = draw.ids(4, 1, seed=1)
    _, cache = draw.logits(model, params, ids[:, :6], positions, cache=jf.init_cache(model.config, 3, 9, kind=kind))
    taken, _ = draw.logits(model, params, step, jnp.full((4, 1), 6), cache=take_rows(cache, rows))
    _, again = draw.logits(
        model, params, ids[rows, :6], positions[rows], cache=jf.init_cache(model.config, 4, 9, kind=kind)
    )
    expected, _ = draw.logits(model, params, step, jnp.full((4, 1), 6), cache=again)
    draw.close(taken, expected, 1e-6)

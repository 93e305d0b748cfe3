import re

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.cache import KINDS, append_positions, store
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

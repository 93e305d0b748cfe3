import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxformer as jf
from jaxformer.masks import documents, positions_from_segments


def ints(low, high, *shape):
    return hnp.arrays(np.int32, shape, elements=st.integers(low, high))


@st.composite
def masks(draw):
    """The arguments of a mask: any positions whatever, with and without segments, one row for all or one each."""
    B, T, S = 2, 4, 5
    q, kv = (draw(ints(-1, 7, draw(st.sampled_from([1, B])), size)) for size in (T, S))
    segments = (draw(ints(0, 2, B, T)), draw(ints(0, 2, B, S))) if draw(st.booleans()) else (None, None)
    causal, window = draw(st.booleans()), draw(st.none() | st.integers(1, 5))
    prefix = draw(ints(0, 6, B, draw(st.sampled_from([1, T])))) if causal and draw(st.booleans()) else None
    return (q, kv, *segments), {"causal": causal, "window": window, "prefix": prefix}


@given(masks())
@settings(deadline=None)
def test_a_mask_is_its_definition(arguments):
    arrays, options = arguments
    given_options = options | {"prefix": None if options["prefix"] is None else jnp.asarray(options["prefix"])}
    mask = jf.Mask(*(None if x is None else jnp.asarray(x) for x in arrays), **given_options)
    expected = np.broadcast_to(oracle.allowed(*arrays, **options), np.broadcast_shapes(mask.dense().shape))
    assert mask.dense().dtype == bool
    np.testing.assert_array_equal(mask.dense(), expected)
    if options["window"] is not None:  # a window that is traced hides the same
        traced = jf.Mask(mask.q_positions, mask.kv_positions, mask.q_segments, mask.kv_segments, mask.is_causal,
                         jnp.asarray(options["window"]), prefix=mask.prefix)  # fmt: skip
        np.testing.assert_array_equal(jax.jit(jf.Mask.dense)(traced), expected)


@given(masks(), st.none() | st.integers(1, 5))
@settings(deadline=None)
def test_a_narrowed_mask_has_both_windows(arguments, window):
    arrays, options = arguments
    options = options | {"prefix": None if options["prefix"] is None else jnp.asarray(options["prefix"])}
    mask = jf.Mask(*(None if x is None else jnp.asarray(x) for x in arrays), **options)
    both = mask.dense()
    if window is not None:
        prefix = options["prefix"]
        both &= jf.Mask(mask.q_positions, mask.kv_positions, None, None, mask.is_causal, window, prefix=prefix).dense()
    np.testing.assert_array_equal(mask.narrowed(window).dense(), both)
    assert mask.narrowed(window).window == min((w for w in (window, mask.window) if w is not None), default=None)
    if window is not None:
        np.testing.assert_array_equal(mask.narrowed(jnp.asarray(window)).dense(), both)


def test_a_prefix_sees_itself_whole_and_the_rest_only_what_is_before():
    dense = jf.Mask.prefix_lm(jnp.asarray([2, 0]), 4).dense()[:, 0]
    np.testing.assert_array_equal(dense[0], [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(dense[1], np.tril(np.ones((4, 4))))


def test_windows_and_positions_of_any_size_do_not_overflow():
    far = jnp.asarray([[2**30 - 1]])
    for causal in (True, False):
        assert jf.Mask(far, far, causal=causal, window=2**31 - 1).dense().all()
        assert jf.Mask(far, far, causal=causal, window=jnp.asarray(2**31 - 1)).dense().all()
    assert jf.Mask(far, far).dense().all()


@given(ints(0, 3, 3, 7))
@settings(deadline=None)
def test_each_run_of_one_segment_number_is_a_document(segments):
    numbers = documents(jnp.asarray(segments))
    np.testing.assert_array_equal(numbers == 0, segments == 0)
    np.testing.assert_array_equal(numbers[:, 1:] == numbers[:, :-1], segments[:, 1:] == segments[:, :-1])
    for row in np.asarray(numbers):
        runs = [number for i, number in enumerate(row) if number and (i == 0 or row[i - 1] != number)]
        assert len(runs) == len(set(runs))


@given(ints(0, 3, 3, 7))
@settings(deadline=None)
def test_positions_count_within_each_segment(segments):
    np.testing.assert_array_equal(
        positions_from_segments(jnp.asarray(segments)), oracle.positions_from_segments(segments)
    )


def test_the_usual_masks_are_the_usual_triangles():
    np.testing.assert_array_equal(jf.Mask.causal(4).dense(), np.tril(np.ones((1, 1, 4, 4), bool)))
    np.testing.assert_array_equal(jf.Mask.full(2, 3).dense(), np.ones((1, 1, 2, 3), bool))
    dense = jf.Mask.from_lengths(jnp.asarray([2, 0, 3]), 3).dense()
    np.testing.assert_array_equal(dense[:, 0, 0], [[True, True, False], [False, False, False], [True, True, True]])


def test_one_query_over_a_longer_cache_sees_all_before_it_and_not_key_0_alone():
    for t in range(5):
        slots = np.where(np.arange(8) <= t, np.arange(8), -1)[None]
        mask = jf.Mask(jnp.asarray([[t]]), jnp.asarray(slots), causal=True)
        np.testing.assert_array_equal(mask.dense()[0, 0, 0], np.arange(8) <= t)


def test_a_window_of_one_is_the_token_itself():
    positions = jnp.arange(5)[None]
    for causal in (True, False):
        dense = jf.Mask(positions, positions, causal=causal, window=1).dense()
        np.testing.assert_array_equal(dense[0, 0], np.eye(5, dtype=bool))


def test_arrays_are_leaves_and_flags_are_static():
    positions, segments = jnp.arange(3)[None], jnp.ones((1, 3), jnp.int32)
    mask = jf.Mask(positions, positions, segments, segments, causal=True, window=2, ordered=True)
    assert len(jax.tree.leaves(mask)) == 2  # what q and kv share is one leaf
    assert (
        len(jax.tree.leaves(jf.Mask(positions, positions + 0, segments, segments + 0, prefix=segments, causal=True)))
        == 5
    )
    assert len(jax.tree.leaves(jf.Mask.full(3, 3))) == 2
    same = jax.tree.map(lambda leaf: leaf + 0, mask)
    assert (same.is_causal, same.window, same.ordered) == (True, 2, True)
    np.testing.assert_array_equal(same.kv_segments, segments)
    traced = []

    @jax.jit
    def dense(mask):
        traced.append(mask.window)
        return mask.dense()

    for window in (None, 1, None, 2):
        again = jf.Mask(positions + 1, positions + 1, causal=True, window=window)
        np.testing.assert_array_equal(dense(again), again.dense())
    assert traced == [None, 1, 2]


def test_what_q_and_kv_share_stays_one_array():
    at, segments = jnp.arange(3)[None], jnp.ones((1, 3), jnp.int32)
    for mask in (jf.Mask(at, at, segments, segments), jf.Mask(at, at), jf.Mask(at, at + 0, segments, segments + 0)):
        shared = mask.q_positions is mask.kv_positions

        def check(mask, shared=shared):
            assert (mask.kv_positions is mask.q_positions) == shared
            assert mask.kv_segments is None or (mask.kv_segments is mask.q_segments) == shared
            return mask.dense()

        for found in (jax.jit(check)(mask), jax.checkpoint(check)(mask), check(jax.tree.map(lambda x: x + 0, mask))):
            np.testing.assert_array_equal(found, mask.dense())


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint32"])
def test_positions_of_every_integer_type_are_the_same_mask(dtype, unchecked):
    at = jnp.arange(8)[None]
    short = at.astype(dtype)
    for options in ({}, {"causal": True}, {"causal": True, "window": 2}, {"window": 3}):
        made = jf.Mask(short, short, short, short, **options)
        np.testing.assert_array_equal(made.dense(), jf.Mask(at, at, at, at, **options).dense())
        assert made.kv_positions is made.q_positions
        assert made.kv_segments is made.q_segments


def test_a_window_of_numpy_is_a_static_one(unchecked):
    at = jnp.arange(4)[None]
    assert jf.Mask(at, at, window=np.int64(2)).window == 2
    with pytest.raises(ValueError, match="window=0 hides every key"):
        jf.Mask(at, at, window=np.int32(0))


def test_a_mask_maps_over_rows():
    lengths = jnp.asarray([[1, 3], [0, 2]])
    dense = jax.vmap(lambda row: jf.Mask.from_lengths(row, 3))(lengths)
    assert dense.q_positions.shape == (2, 2, 3)
    each = jax.vmap(lambda mask: mask.dense())(dense)
    np.testing.assert_array_equal(each[1], jf.Mask.from_lengths(lengths[1], 3).dense())


def test_a_mask_says_what_it_is():
    text = repr(jf.Mask.causal(2))
    assert "causal=True" in text
    assert "window=None" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_segments": None}, "q_segments and kv_segments belong together; give both or neither"),
        ({"q_segments": None}, "q_segments and kv_segments belong together"),
        ({"q_positions": jnp.arange(3)}, r"q_positions has shape \(3,\); it must be \[batch, tokens\]"),
        ({"kv_positions": jnp.zeros((1, 1, 4), int)}, r"kv_positions has shape \(1, 1, 4\)"),
        ({"q_segments": jnp.ones((2, 4), int)}, r"q_segments \(2, 4\) do not match q_positions \(2, 3\)"),
        ({"kv_segments": jnp.ones((2, 3), int)}, r"kv_segments \(2, 3\) do not match kv_positions \(2, 4\)"),
        ({"q_segments": jnp.ones((3, 3), int)}, r"have \[2, 3\] rows; each must have the batch's, or 1"),
        ({"kv_positions": jnp.ones((3, 4), int)}, r"have \[2, 3\] rows"),
        ({"window": 0}, "window=0 hides every key; it counts the token itself, so it must be at least 1"),
        ({"window": -1}, "window=-1 hides every key"),
        ({"window": jnp.ones(3, int)}, r"a window that is an array must be one integer, not int32\[3\]"),
        ({"window": jnp.ones(())}, r"must be one integer, not float32\[\]"),
        ({"q_positions": jnp.ones((2, 3))}, "positions and segments of a mask are integers, not float32"),
        (
            {"prefix": jnp.ones((2, 1), int)},
            "a prefix lifts the causal order from the first positions; give causal",
        ),
        ({"prefix": jnp.ones((2, 2), int), "causal": True}, r"prefix has shape \(2, 2\); it must be \[batch, 1\] or"),
    ],
)
def test_what_is_no_mask_is_refused(change, message, unchecked):
    q, kv = jnp.ones((2, 3), int), jnp.ones((2, 4), int)
    arguments = {"q_positions": q, "kv_positions": kv, "q_segments": q, "kv_segments": kv}
    assert jf.Mask(**arguments).dense().shape == (2, 1, 3, 4)
    with pytest.raises(ValueError, match=message):
        jf.Mask(**(arguments | change))

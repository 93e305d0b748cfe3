"""What must hold of every model: causality, padding and packing that change nothing, order known from positions only,
one arithmetic in a loop and in a scan.
"""

import dataclasses
from functools import partial

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from jax.tree_util import Partial
from tolerances import FLOAT32

import jaxformer as jf

SCHEMES = ["none", "learned", "sinusoidal", "sinusoidal_halves", "rotary", "alibi", "relative"]
SAME = 1e-6  # two programs of the same arithmetic
IDS = draw.ids(2, 6)


@pytest.fixture(params=SCHEMES)
def model(request):
    return draw.model(positions=request.param)


def influence(*args, **kwargs):
    """[B T S]: the size of the gradient of token t's logits with respect to the embedding of token s."""
    return np.abs(np.asarray(_gradients(*args, **kwargs))).max(axis=-1).swapaxes(0, 1)


@partial(jax.jit, static_argnums=0)
def _gradients(model, params, ids, positions=None, segments=None, mask=None):
    T, width = ids.shape[1], model.config.d_model
    weights = jnp.asarray(np.random.default_rng(1).normal(size=model.config.vocab_size), jnp.float32)

    def of_token(added, t):
        variables = {"params": params, "edits": {"x": Partial(jnp.add, added)}}
        return (model.apply(variables, ids, positions, segments, mask)[:, t] @ weights).sum()

    return jax.vmap(jax.grad(of_token), in_axes=(None, 0))(jnp.zeros((*ids.shape, width)), jnp.arange(T))


def test_no_token_depends_on_a_later_one_and_each_on_all_before_it(model):
    seen = influence(*model, IDS)
    np.testing.assert_array_equal(seen > 0, np.broadcast_to(np.tril(np.ones((6, 6), bool)), (2, 6, 6)))


def test_a_mask_replaces_the_causal_one():
    model, params = draw.model()
    np.testing.assert_array_equal(influence(model, params, IDS, mask=jf.Mask.full(6, 6)) > 0, np.ones((2, 6, 6), bool))
    at = jnp.arange(6)[None]
    window = influence(model, params, IDS, mask=jf.Mask(at, at, causal=True, window=2)) > 0
    reach = oracle.allowed(at, at, causal=True, window=3)[:, 0]  # two layers of two tokens each
    np.testing.assert_array_equal(window, np.broadcast_to(reach, (2, 6, 6)))


LEFT = np.array([[-1, -1, -1, 0, 1, 2, 3], [-1, 0, 1, 2, 3, 4, 5]])
RIGHT = np.array([[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, 5, -1]])
HOLES = np.array([[0, 1, -1, -1, 2, -1, 3], [0, -1, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize("at", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
def test_padding_changes_nothing(model, at):
    model, params = model
    alone = [draw.logits(model, params, draw.ids(2, T)[:, :T]) for T in (4, 6)]
    texts = [draw.ids(2, T) for T in (4, 6)]
    padded = np.zeros((2, 7), np.int32)
    for row, text in enumerate(texts):
        padded[row, at[row] >= 0] = text[row]
    logits = draw.logits(model, params, jnp.asarray(padded), jnp.asarray(at))
    assert np.isfinite(logits).all()
    for row in range(2):
        draw.close(logits[row, at[row] >= 0], alone[row][row], FLOAT32)
    for pad_id in (9, 28):
        other = draw.logits(model, params, jnp.asarray(np.where(at < 0, pad_id, padded)), jnp.asarray(at))
        np.testing.assert_array_equal(other[at >= 0], logits[at >= 0])
    reached = influence(model, params, jnp.asarray(padded), jnp.asarray(at))
    assert not (reached * (at >= 0)[:, :, None])[np.broadcast_to((at < 0)[:, None], (2, 7, 7))].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_padding_only_is_finite_and_harms_no_gradient(dtype):
    model, params = draw.model(dtype=dtype, positions="learned")
    at = jnp.asarray([[0, 1, 2, 3], [-1, -1, -1, -1]])
    ids = draw.ids(2, 4)

    @jax.jit
    def loss_and_gradient(at):
        def loss(params):
            values = jf.losses.cross_entropy(model.apply({"params": params}, ids, at), ids)
            return jf.losses.weighted_mean(values, jnp.asarray([[1.0], [0.0]]) * jnp.ones((2, 4)))

        return jax.value_and_grad(loss)(params)

    text = jnp.asarray([[0, 1, 2, 3], [0, 1, 2, 3]])
    assert np.isfinite(draw.logits(model, params, ids, at)).all()
    jax.tree.map(np.testing.assert_array_equal, loss_and_gradient(at), loss_and_gradient(text))


PACKED = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 3, 0, 0]])


def test_packed_documents_equal_separate_ones(model):
    model, params = model
    ids = draw.ids(2, 8)
    logits = draw.logits(model, params, ids, segments=jnp.asarray(PACKED))
    assert np.isfinite(logits).all()
    for row, document in ((0, 1), (0, 2), (1, 1), (1, 2), (1, 3)):
        at = np.flatnonzero(PACKED[row] == document)
        text = np.zeros((1, 4), np.int32)  # one shape for all; what follows the text changes nothing
        text[0, : len(at)] = ids[row, at]
        draw.close(logits[row, at], draw.logits(model, params, jnp.asarray(text))[0, : len(at)], FLOAT32)


def test_packed_documents_do_not_touch_each_other(model):
    model, params = model
    ids, segments = draw.ids(2, 8), jnp.asarray(PACKED)
    logits = draw.logits(model, params, ids, segments=segments)
    changed = jnp.where(segments == 1, (ids + 5) % 29, ids)
    other = draw.logits(model, params, changed, segments=segments)
    np.testing.assert_array_equal(other[PACKED > 1], logits[PACKED > 1])
    assert (other[PACKED == 1] != logits[PACKED == 1]).any(axis=-1).all()
    same = (PACKED[:, :, None] == PACKED[:, None, :]) & np.tril(np.ones((8, 8), bool))
    real = PACKED > 0
    np.testing.assert_array_equal(influence(model, params, ids, segments=segments)[real] > 0, same[real])


def test_the_gradient_of_one_document_does_not_know_the_other():
    model, params = draw.model()
    segments = jnp.asarray(PACKED[:1])

    def loss(params, ids):
        values = jf.losses.cross_entropy(model.apply({"params": params}, ids, segments=segments), jnp.roll(ids, -1))
        return jf.losses.weighted_mean(values, (segments == 2).astype(jnp.float32))

    ids = draw.ids(1, 8)
    changed = jnp.where(segments == 1, (ids + 5) % 29, ids)
    gradient, other = (jax.jit(jax.grad(loss))(params, x) for x in (ids, changed))
    gradient["embed"], other["embed"] = {}, {}  # the rows of the changed ids are others by right
    jax.tree.map(np.testing.assert_array_equal, gradient, other)


def test_only_positions_know_the_order(model):
    """Without a causal mask, tokens in another order give the same logits in that order, if positions go along."""
    model, params = model
    order = np.array([3, 0, 5, 1, 4, 2])
    full = jf.Mask.full(6, 6)
    logits = draw.logits(model, params, IDS, mask=full)
    at = jnp.asarray(order)[None]
    draw.close(draw.logits(model, params, IDS[:, order], at, mask=jf.Mask(at, at)), logits[:, order], FLOAT32)
    moved = abs(draw.logits(model, params, IDS[:, order], mask=full) - logits[:, order]).max()
    assert moved < FLOAT32 if model.config.positions == "none" else moved > 100 * FLOAT32


def test_rows_of_a_batch_do_not_know_each_other(model):
    model, params = model
    both = draw.logits(model, params, IDS)
    np.testing.assert_array_equal(draw.logits(model, params, IDS.at[0].set(7))[1], both[1])


@given(draw.configs())
@settings(deadline=None, max_examples=4, derandomize=True)  # each compiles: the same ones can come from the cache
def test_a_scan_of_any_config_is_its_loop(config):
    loop, scan = (jf.build(dataclasses.replace(config, dtype="float32", scan_layers=scan)) for scan in (False, True))
    params = draw.params(loop)
    stacked = jf.trees.stack_layers(params)
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, draw.params(scan))
    ids = draw.ids(1, 5, vocab_size=config.vocab_size)
    expected = draw.logits(loop, params, ids)
    draw.close(draw.logits(scan, stacked, ids), expected, SAME * max(1, abs(expected).max()))


def test_a_scan_has_the_gradients_of_its_loop():
    loop, params = draw.model()
    scan = jf.build(draw.tiny(scan_layers=True))

    def loss(params, model):
        return jf.losses.cross_entropy(model.apply({"params": params}, IDS), IDS).mean()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    by_loop, by_scan = gradient(params, loop), gradient(jf.trees.stack_layers(params), scan)
    jax.tree.map(lambda a, b: draw.close(a, b, SAME), by_scan, jf.trees.stack_layers(by_loop))


def test_patterns_over_the_layers_are_the_same_in_a_scan():
    fields = {"num_layers": 5, "window": (2, None, 4), "rotary": (jf.Rotary(base=9.0), jf.Rotary(base=90.0, width=4))}
    loop, scan = (jf.build(draw.tiny(**fields, scan_layers=scan)) for scan in (False, True))
    params = draw.params(loop)
    expected = draw.logits(loop, params, IDS)
    draw.close(draw.logits(scan, jf.trees.stack_layers(params), IDS), expected, SAME * max(1, abs(expected).max()))
    for change in ({"window": None}, {"window": (2, None)}, {"rotary": jf.Rotary(base=9.0)}):
        other = jf.build(dataclasses.replace(loop.config, **change))
        assert abs(draw.logits(other, params, IDS) - expected).max() > 100 * FLOAT32

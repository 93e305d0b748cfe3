"""What training minimises: the same numbers however they are computed."""

import dataclasses
from functools import partial

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draw import close
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.data import Batch
from jaxformer.losses import in_blocks, weighted_mean
from jaxformer.objectives import classes, masked_token, next_token, sequence_to_sequence
from jaxformer.pairs import pad_pairs

B, T = 3, 7


def batch(seed=0):
    rng = np.random.default_rng(seed)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]], np.int32)
    ids, labels = (rng.integers(29, size=(B, T)).astype(np.int32) for _ in range(2))
    weights = np.where(segments > 0, rng.integers(1, 4, size=(B, T)) / 2, 0).astype(np.float32)
    return Batch(ids, labels, weights, oracle.positions_from_segments(segments).astype(np.int32), segments)


@partial(jax.jit, static_argnames=("model", "options"))
def value_and_grad(model, params, rows, options):
    def loss(params):
        return weighted_mean(*next_token(model, params, rows, **dict(options)))

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": False, "head_bias": True, "logit_softcap": 2.0}])
@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_logits_in_blocks_give_the_same_loss_and_gradients(block, fields):
    model, params = draw.model(**fields)
    options = (("label_smoothing", 0.1), ("z_loss", 1e-3))
    expected = value_and_grad(model, params, batch(), options)
    found = value_and_grad(model, params, batch(), (("block", block), *options))
    jax.tree.map(lambda a, b: close(a, b, FLOAT32), found, expected)


def test_smoothing_and_z_loss_reach_the_loss():
    model, params = draw.model()
    rows = batch()
    logits = oracle.decoder(params, model.config.to_dict(), rows.ids, rows.positions, rows.segments)
    options = {"label_smoothing": 0.2, "z_loss": 0.01}
    expected = oracle.cross_entropy(logits, rows.labels, rows.weights, **options)
    close(value_and_grad(model, params, rows, tuple(options.items()))[0], expected, FLOAT32)


def test_a_function_in_blocks_is_the_function(rng):
    x, y = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32), jnp.arange(10.0).reshape(2, 5)
    for block in (1, 2, 5, 9):
        found = in_blocks(lambda x, y: (x.sum(axis=-1) * y)[..., None] * jnp.ones(4), block, x, y)
        close(found, (x.sum(axis=-1) * y)[..., None] * np.ones(4), FLOAT32)
    with pytest.raises(ValueError, match="block=0 must be at least 1 column"):
        in_blocks(lambda x: x, 0, x)


def loss_memory(block, V, T):
    """Bytes that the compiled loss and its gradients take besides arguments and results."""
    model = jf.build(jf.Config(vocab_size=V, max_len=T, d_model=64, num_layers=1, num_heads=1, tie_embeddings=False))
    row = jax.ShapeDtypeStruct((1, T), jnp.int32)
    rows = Batch(row, row, jax.ShapeDtypeStruct((1, T), jnp.float32), row, row)
    params = jax.eval_shape(model.init, jax.random.key(0), row)["params"]
    program = value_and_grad.lower(model, params, rows, (("block", block),)).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_in_blocks_no_array_of_all_logits_exists():
    V, T = 8192, 1024
    whole, blocks = (loss_memory(block, V, T) for block in (None, 64))
    assert whole > 4 * V * T
    assert blocks < whole / 5


# Other objectives -----------------------------------------------------------------------------------------------------


def test_masked_tokens_are_found_given_the_others():
    model, params = draw.model(architecture="encoder", head="masked_lm", head_bias=True)
    rows = batch()
    chosen = (np.arange(T) % 3 == 1) & (rows.weights > 0)
    rows = dataclasses.replace(rows, weights=chosen.astype(np.float32))
    losses, weights = jax.jit(partial(masked_token, model))(params, rows)
    logits = oracle.encoder(params, model.config.to_dict(), rows.ids, rows.positions, rows.segments)
    expected = oracle.cross_entropy(logits, rows.labels, rows.weights)
    close(weighted_mean(losses, weights), expected, FLOAT32)


def test_targets_are_written_given_their_source():
    model = jf.build(draw.tiny(architecture="encoder_decoder"))
    params = draw.variables(model, draw.ids(1, 1), draw.ids(1, 1))["params"]
    pairs = pad_pairs([[3, 4, 5], [6]], [[7], [8, 9]], source_len=5, target_len=4, start_id=1, end_id=2, pad_id=0)
    losses, weights = jax.jit(partial(sequence_to_sequence, model, label_smoothing=0.1))(params, pairs)
    logits = oracle.encoder_decoder(
        params, model.config.to_dict(), pairs.ids, pairs.target.ids, pairs.positions, pairs.target.positions
    )
    expected = oracle.cross_entropy(logits, pairs.target.labels, pairs.target.weights, label_smoothing=0.1)
    close(weighted_mean(losses, weights), expected, FLOAT32)
    alone = pad_pairs([[6]], [[8, 9]], source_len=2, target_len=3, start_id=1, end_id=2)
    plain = jax.jit(partial(sequence_to_sequence, model))
    close(plain(params, alone)[0], plain(params, pairs)[0][1:, :3], FLOAT32)


@pytest.mark.parametrize("head", ["classifier", "token_classifier"])
def test_classes_of_texts_and_of_tokens(head):
    model, params = draw.model(architecture="encoder", head=head, num_labels=4)
    rows = batch()
    shape = (B,) if head == "classifier" else (B, T)
    labels = np.arange(np.prod(shape)).reshape(shape) % 4
    rows = dataclasses.replace(rows, labels=labels, weights=np.ones(shape, np.float32))
    losses, weights = jax.jit(partial(classes, model))(params, rows)
    assert losses.shape == weights.shape == shape
    logits = draw.logits(model, params, *map(jnp.asarray, (rows.ids, rows.positions, rows.segments)))
    close(losses.mean(), oracle.cross_entropy(np.asarray(logits), labels, np.ones(shape)), FLOAT32)


def test_an_encoder_decoder_learns_to_turn_texts_around():
    model = jf.build(draw.tiny(architecture="encoder_decoder", d_model=32))
    optimizer = jf.optim.adamw(3e-3, weight_decay=0.0)
    state = jf.init_state(model, optimizer, seed=0)
    step = jf.make_train_step(model, optimizer, objective=sequence_to_sequence)
    rng = np.random.default_rng(0)
    texts = rng.integers(3, 29, size=(8, 4)).tolist()
    pairs = pad_pairs(texts, [text[::-1] for text in texts], source_len=5, target_len=5, start_id=1, end_id=2)
    for _ in range(150):
        state, metrics = step(state, pairs)
    assert metrics["loss"] < 0.05
    start = np.full((8, 1), 1)
    new = jf.generate(model, state.params, pairs.ids, target_ids=start, max_new_tokens=5, eos_id=2)
    np.testing.assert_array_equal(new.ids, pairs.target.labels)


# Pairs ----------------------------------------------------------------------------------------------------------------


def test_pairs_have_starts_ends_and_padding():
    pairs = pad_pairs([[3, 4], [5]], [[6], []], source_len=4, target_len=2, start_id=1, end_id=2, pad_id=9)
    np.testing.assert_array_equal(pairs.ids, [[3, 4, 2, 9], [5, 2, 9, 9]])
    np.testing.assert_array_equal(pairs.positions, [[0, 1, 2, -1], [0, 1, -1, -1]])
    np.testing.assert_array_equal(pairs.target.ids, [[1, 6], [1, 9]])
    np.testing.assert_array_equal(pairs.target.labels, [[6, 2], [2, 9]])
    np.testing.assert_array_equal(pairs.target.weights, [[1, 1], [1, 0]])
    np.testing.assert_array_equal(pairs.target.positions, [[0, 1], [0, -1]])


def test_the_end_is_a_label_though_padding_has_its_id():
    pairs = pad_pairs([[3]], [[5, 6]], source_len=2, target_len=5, start_id=1, end_id=2, pad_id=2)
    np.testing.assert_array_equal(pairs.target.labels, [[5, 6, 2, 2, 2]])
    np.testing.assert_array_equal(pairs.target.weights, [[1, 1, 1, 0, 0]])


@pytest.mark.parametrize(("sources", "targets", "message"), [
    ([], [], "0 sources and 0 targets make no pairs"),
    ([[3]], [[4], [5]], "1 sources and 2 targets make no pairs"),
    ([[3] * 4], [[4]], "source 0 has 5 tokens with its end, over the 4 that fit"),
    ([[3], [3]], [[4], [4, 4]], "target 1 has 3 tokens with its end, over the 2 that fit"),
])  # fmt: skip
def test_pairs_that_do_not_fit_are_refused(sources, targets, message):
    with pytest.raises(ValueError, match=message):
        pad_pairs(sources, targets, source_len=4, target_len=2, start_id=1, end_id=2)

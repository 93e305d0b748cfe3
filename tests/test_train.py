"""The training step against the oracle, and what one step may know of the others."""

import dataclasses
import functools
import math

import draw
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from draw import close
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.data import Batch, Windows, encode_documents
from jaxformer.losses import cross_entropy
from jaxformer.objectives import next_token
from jaxformer.tokenizers import Tokenizer

B, T = 3, 6


def batch(seed=0):
    """Two documents a row and padding at the end of the second and the third one; weights differ."""
    rng = np.random.default_rng(seed)
    segments = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 0]], np.int32)
    return Batch(
        ids=rng.integers(29, size=(B, T)).astype(np.int32),
        labels=rng.integers(29, size=(B, T)).astype(np.int32),
        weights=np.where(segments > 0, rng.integers(1, 4, size=(B, T)) / 2, 0).astype(np.float32),
        positions=oracle.positions_from_segments(segments).astype(np.int32),
        segments=segments,
    )


@functools.cache
def trainer(optimizer="adamw", seed=0, **fields):
    """The tiny model with its compiled step; each is compiled once for all tests."""
    made = jf.build(draw.tiny(**fields))
    optimizers = {"adamw": lambda: jf.optim.adamw(1e-2), "sgd": lambda: optax.sgd(1.0)}
    tx = optimizers[optimizer]()
    return made, tx, jf.make_train_step(made, tx, seed=seed)


def fresh(optimizer="adamw", step=0, **fields):
    """A state of the tiny model at random parameters; a new one each time, because a step donates it."""
    made, tx, _ = trainer(optimizer, **fields)
    params = draw.params(made)
    return jf.TrainState(jnp.asarray(step, jnp.int32), params, tx.init(params))


def bits(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same(a, b):
    for x, y in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(x, y)


def oracle_loss(params, config, rows):
    logits = oracle.decoder(params, config.to_dict(), rows.ids, rows.positions, rows.segments)
    return oracle.cross_entropy(logits, rows.labels, rows.weights)


def test_the_loss_is_the_oracles_and_the_gradient_its_slope_in_every_direction():
    made, _, step = trainer("sgd")
    state, rows = fresh("sgd"), batch()
    before = jax.tree.map(np.float64, state.params)
    state, metrics = step(state, rows)
    close(metrics["loss"], oracle_loss(before, made.config, rows), FLOAT32)
    gradient = jax.tree.map(lambda old, new: old - np.float64(new), before, state.params)  # SGD of rate 1
    close(metrics["grad_norm"], oracle.global_norm(gradient), FLOAT32)
    assert metrics["weight"] == rows.weights.sum()
    rng, h = np.random.default_rng(1), 1e-5
    for _ in range(3):
        direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), before)
        length = oracle.global_norm(direction)
        direction = jax.tree.map(lambda leaf, length=length: leaf / length, direction)
        up, down = (
            oracle_loss(jax.tree.map(lambda p, d, s=s: p + s * d, before, direction), made.config, rows)
            for s in (h, -h)
        )
        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient, direction)))
        close(slope, (up - down) / (2 * h), FLOAT32)


def test_a_step_is_the_gradient_and_the_optimizer_written_out():
    made, tx, step = trainer()
    rows = jax.tree.map(jnp.asarray, batch())

    @jax.jit
    def plain(state):
        def loss(params):
            logits = made.apply({"params": params}, rows.ids, rows.positions, rows.segments)
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), rows.labels[..., None], axis=-1)[..., 0]
            return -(rows.weights * picked).sum() / rows.weights.sum()

        gradient = jax.grad(loss)(state.params)
        updates, opt_state = tx.update(gradient, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state, gradient

    params, opt_state, gradient = plain(fresh())
    state, metrics = step(fresh(), rows)
    assert state.step == 1
    assert metrics["grad_norm"] > 1  # and so it is clipped, but told as it was
    close(metrics["grad_norm"], oracle.global_norm(gradient), FLOAT32)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(opt_state)
    # Of the moments, because AdamW's first step makes a rounding of a tiny gradient a step of full size.
    for moment in ("mu", "nu"):
        for a, b in zip(*(bits(optax.tree.get(x, moment)) for x in (state.opt_state, opt_state)), strict=True):
            close(a, b, FLOAT32)
    moved = [abs(a - b) for a, b in zip(bits(state.params), bits(fresh().params), strict=True)]
    assert 0.005 < max(x.max() for x in moved) < 0.05
    large = [abs(x) > 1e-6 for x in bits(optax.tree.get(opt_state, "mu"))]
    for a, b, clear in zip(bits(state.params), bits(params), large, strict=True):
        close(a[clear], b[clear], FLOAT32)


def test_the_old_state_is_donated():
    _, _, step = trainer()
    state = fresh()
    step(state, batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_many_steps_compile_once():
    made, tx, _ = trainer()
    step = jf.make_train_step(made, tx)
    state = jf.init_state(made, tx, seed=0)
    for number in range(4):
        state, _ = step(state, batch(number))
    assert step._cache_size() == 1
    assert state.step == 4


def test_tokens_without_weight_change_neither_loss_nor_gradient():
    """Whatever their labels are, and however many rows of padding there are."""
    _, _, step = trainer("sgd")
    rows = batch()
    labels = np.where(rows.weights > 0, rows.labels, 2**31 - 1)
    same(step(fresh("sgd"), rows), step(fresh("sgd"), dataclasses.replace(rows, labels=labels)))
    padding = {"ids": 0, "labels": -7, "weights": 0, "positions": -1, "segments": 0}
    padding = Batch(**{name: np.full_like(leaf, padding[name]) for name, leaf in vars(rows).items()})
    taller = jax.tree.map(lambda *leaves: np.concatenate(leaves), rows, padding)
    for a, b in zip(bits(step(fresh("sgd"), rows)), bits(step(fresh("sgd"), taller)), strict=True):
        close(a, b, FLOAT32)


def test_parts_of_a_batch_count_by_their_weight_and_not_alike():
    _, _, step = trainer("sgd")
    rows = batch()
    whole, metrics = step(fresh("sgd"), rows)
    loss, params, total = 0.0, jax.tree.map(np.zeros_like, whole.params), rows.weights.sum()
    for number in range(B):
        # The same shape, so that nothing is compiled again: the other rows without weight.
        weights = np.where(np.arange(B)[:, None] == number, rows.weights, 0)
        state, part = step(fresh("sgd"), dataclasses.replace(rows, weights=weights))
        share = part["weight"] / total
        loss += share * part["loss"]
        params = jax.tree.map(lambda a, b, share=share: a + share * np.asarray(b), params, state.params)
    close(loss, metrics["loss"], FLOAT32)
    for a, b in zip(bits(params), bits(whole.params), strict=True):
        close(a, b, FLOAT32)


def test_accumulated_gradients_count_tokens_and_not_parts():
    """One real token in the one part and three in the other: (4 + 1 + 1 + 1) / 4, and no mean of means."""
    values = jnp.asarray([[4.0, 9, 9], [1, 1, 1]])
    weights = jnp.asarray([[1.0, 0, 0], [1, 1, 1]])

    def objective(model, params, rows, key):
        return params["w"] * rows[0], rows[1]

    for parts in (1, 2):
        step = jf.make_train_step(jf.build(draw.tiny()), optax.sgd(0.1), objective=objective, accumulate=parts)
        params = {"w": jnp.ones(())}
        state, metrics = step(
            jf.TrainState(jnp.zeros((), jnp.int32), params, optax.sgd(0.1).init(params)), (values, weights)
        )
        close(metrics["loss"], 1.75, FLOAT32)
        close(metrics["grad_norm"], 1.75, FLOAT32)
        close(state.params["w"], 0.825, FLOAT32)
        assert (state.step, metrics["weight"]) == (1, 4)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_in_parts_is_the_step_at_once(parts):
    """Clipping, decay, schedule and step count act once."""
    made = jf.build(draw.tiny())
    rows = jax.tree.map(lambda a, b, c: np.concatenate([a, b, c])[:8], batch(0), batch(1), batch(2))
    # At the usual eps AdamW makes whole steps of the rounding in gradients that are 0, such as those of key biases.
    tx = jf.optim.adamw(jf.schedules.warmup_cosine(1e-2, 1, 5), clip_norm=0.5, eps=1e-3)

    def run(parts):
        params = draw.params(made)
        state = jf.TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))
        step = jf.make_train_step(made, tx, accumulate=parts)
        for _ in range(2):
            state, metrics = step(state, rows)
        return state, metrics

    (state, metrics), (expected, whole) = run(parts), run(1)
    assert state.step == expected.step == 2
    for a, b in zip(bits((state, metrics)), bits((expected, whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_parts_draw_dropout_of_their_own_and_must_divide_the_rows():
    made = jf.build(draw.tiny(dropout=0.5))
    same_row = jax.tree.map(lambda leaf: np.repeat(leaf[:1], 2, axis=0), batch())
    seen = []

    def objective(model, params, rows, key):
        jax.debug.callback(lambda key: seen.append(np.asarray(key).tolist()), jax.random.key_data(key))
        return next_token(model, params, rows, key)

    step = jf.make_train_step(made, optax.sgd(0.1), objective=objective, accumulate=2)
    params = draw.params(made)
    state = jf.TrainState(jnp.zeros((), jnp.int32), params, optax.sgd(0.1).init(params))
    jax.block_until_ready(step(state, same_row))
    assert len(seen) == 2
    assert seen[0] != seen[1]
    with pytest.raises(ValueError, match="a batch of 3 rows cannot be split into accumulate=2 equal parts"):
        step(jf.init_state(made, optax.sgd(0.1), 0), batch())
    with pytest.raises(ValueError, match="accumulate=0 must be at least 1"):
        jf.make_train_step(made, optax.sgd(0.1), accumulate=0)


def test_a_step_that_is_left_out_changes_nothing_but_its_count():
    made, tx, _ = trainer()
    tx = jf.optim.skip_spikes(tx)
    step = jf.make_train_step(made, tx)
    params = draw.params(made)
    state, metrics = step(jf.TrainState(jnp.zeros((), jnp.int32), params, tx.init(params)), batch())
    before = bits(state.params)
    broken = dataclasses.replace(batch(), labels=np.full((B, T), 10**6, np.int32))
    assert metrics["skipped"] == 0
    state, metrics = step(state, broken)
    assert (state.step, metrics["skipped"]) == (2, 1)
    assert np.isnan(metrics["loss"])
    for a, b in zip(bits(state.params), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_end_of_a_document_is_learned_though_padding_has_its_id():
    tokenizer = Tokenizer.bytes()
    rows = Windows(encode_documents(tokenizer, ["ab"]), 5, tokenizer.end_id).batch(np.array([0]))
    np.testing.assert_array_equal(rows.ids, [[256, 97, 98, 256, 256]])
    np.testing.assert_array_equal(rows.weights, [[1, 1, 1, 0, 0]])
    made, params = draw.model(vocab_size=257)
    values, weights = jax.jit(functools.partial(next_token, made))(params, rows)
    logits = oracle.decoder(params, made.config.to_dict(), [[256, 97, 98]])
    expected = [oracle.cross_entropy(logits[:, t], [label], [1]) for t, label in enumerate([97, 98, 256])]
    close(values[0, :3], expected, FLOAT32)
    np.testing.assert_array_equal(weights, rows.weights)


def losses(step, states):
    return [float(step(state, batch())[1]["loss"]) for state in states]


def test_dropout_follows_from_seed_and_step_alone():
    made, _, step = trainer(dropout=0.5)
    others = trainer(dropout=0.5, seed=1)[2]
    a, again, later = losses(step, [fresh(dropout=0.5, step=k) for k in (3, 3, 4)])
    (other,) = losses(others, [fresh(dropout=0.5, step=3)])
    assert a == again
    assert len({a, later, other}) == 3
    total, weight = jf.make_eval_step(made)(fresh(dropout=0.5).params, batch())
    close(total / weight, oracle_loss(fresh().params, made.config, batch()), FLOAT32)  # and none without a key


def test_every_row_has_a_dropout_of_its_own():
    made, params = draw.model(dropout=0.5)
    rows = jax.tree.map(lambda leaf: np.tile(leaf[:1], (4, 1)), batch())
    objective = jax.jit(functools.partial(next_token, made))
    values, _ = objective(params, rows, jax.random.key(0))
    assert len(np.unique(np.asarray(values[:, 0]))) == 4
    without, _ = objective(params, rows)
    assert len(np.unique(np.asarray(without[:, 0]))) == 1


def test_a_run_resumed_is_bit_for_bit_the_run_without_a_stop():
    _, _, step = trainer(dropout=0.5)
    whole = jf.fit(fresh(dropout=0.5), step, map(batch, range(6)), 6)
    part = jf.fit(fresh(dropout=0.5), step, map(batch, range(2)), 2)
    on_disk = jax.tree.map(np.asarray, part)
    resumed = jf.fit(jax.tree.map(jnp.asarray, on_disk), step, map(batch, range(2, 6)), 6)
    same(resumed, whole)


def test_the_same_seed_begins_with_the_same_parameters_and_another_with_others():
    made, tx, _ = trainer()
    first, again, other = (jf.init_state(made, tx, seed) for seed in (0, 0, 1))
    same(first, again)
    kernels = [
        jax.tree.leaves(state.params["decoder"]["layers_0"]["mlp"]["up_proj"]["kernel"])[0] for state in (first, other)
    ]
    assert (kernels[0] != kernels[1]).all()
    assert first.step == 0
    assert not any(leaf.any() for leaf in bits(optax.tree.get(first.opt_state, "nu")))


def test_under_bfloat16_parameters_and_moments_are_float32_and_move_by_small_steps():
    made = jf.build(draw.tiny(dtype="bfloat16"))
    tx = jf.optim.adamw(1e-3)
    state = jf.init_state(made, tx, seed=0)
    step = jf.make_train_step(made, tx)
    state = jf.fit(state, step, map(batch, range(100)), 100)
    leaves = jax.tree.leaves((state.params, *(optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    scales = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params) if path[-1].key == "scale"]
    values = np.concatenate(scales)
    assert (values != 1).mean() >= 0.95
    # In bfloat16 itself the spacing just below 1 would have swallowed every step of 0.001.
    assert 0.001 < abs(values - 1).mean() < 0.1


def test_evaluation_is_the_sum_over_all_batches():
    made, params = draw.model()
    batches = [batch(seed) for seed in range(3)]
    total, weight = jf.evaluate(jf.make_eval_step(made), params, batches)
    expected = sum(oracle_loss(params, made.config, rows) * rows.weights.sum() for rows in batches)
    close(total / weight, expected / weight, FLOAT32)
    assert weight == sum(float(rows.weights.sum()) for rows in batches)
    assert (type(total), type(weight)) == (float, float)


def test_a_long_evaluation_loses_no_small_batch():
    """2^24 and then a hundred ones: a float32 sum would stand still."""
    sums = [2.0**24] + [1.0] * 100
    batches = [Batch(*[jnp.float32(size)] * 5) for size in sums]
    total, weight = jf.evaluate(lambda _, rows: (rows.ids, rows.weights), None, batches)
    assert total == weight == math.fsum(sums)


def test_another_objective_is_minimised_if_given():
    def smoothed(model, params, rows, dropout_key):
        logits = model.apply({"params": params}, rows.ids, rows.positions, rows.segments)
        return cross_entropy(logits, rows.labels, label_smoothing=0.3), rows.weights

    made, tx, _ = trainer("sgd")
    rows, params = batch(), fresh("sgd").params
    logits = oracle.decoder(params, made.config.to_dict(), rows.ids, rows.positions, rows.segments)
    expected = oracle.cross_entropy(logits, rows.labels, rows.weights, label_smoothing=0.3)
    _, metrics = jf.make_train_step(made, tx, objective=smoothed)(fresh("sgd"), rows)
    close(metrics["loss"], expected, FLOAT32)
    total, weight = jf.make_eval_step(made, objective=smoothed)(params, rows)
    close(total / weight, expected, FLOAT32)


def test_the_step_can_be_part_of_a_larger_program():
    _, _, step = trainer("sgd")
    rows = jax.tree.map(jnp.asarray, batch())
    steps = jax.jit(lambda state: jax.lax.scan(lambda s, _: step.__wrapped__(s, rows), state, length=2))
    state, _ = steps(fresh("sgd"))
    again = jf.fit(fresh("sgd"), step, iter([rows] * 2), 2)
    for a, b in zip(bits(state), bits(again), strict=True):
        close(a, b, FLOAT32)
    assert state.step == 2


def test_training_learns_a_small_text_by_heart():
    made, tx, step = trainer()
    rows = batch()
    state = jf.init_state(made, tx, seed=0)
    curve = []
    jf.fit(state, step, iter([rows] * 150), 150, callbacks=[lambda *call: curve.append(float(call[2]["loss"]))])
    assert curve[0] > 2.5
    assert curve[-1] < 0.3

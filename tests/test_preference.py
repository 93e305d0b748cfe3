"""Preferences: the published losses, answers only, and a reference that is computed once."""

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
from jaxformer.preference import LOSSES, Answers, Preferences, dpo, ipo, preference, simpo, with_reference

B, T = 3, 6


def rows(seed):
    """Texts of one document, of which the last few labels are the answer."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(29, size=(B, T + 1)).astype(np.int32)
    lengths = rng.integers(4, T + 1, size=(B, 1))
    real, at = np.arange(T) < lengths, np.broadcast_to(np.arange(T), (B, T))
    weights = (real & (at >= 2)).astype(np.float32)
    return Batch(ids[:, :-1], ids[:, 1:], weights, np.where(real, at, -1).astype(np.int32), real.astype(np.int32))


def oracle_answers(params, config, batch):
    """Log-probabilities and lengths of the answers, one text at a time."""
    totals = []
    for row in range(B):
        length = int((batch.positions[row] >= 0).sum())
        logits = oracle.decoder(params, config.to_dict(), batch.ids[row : row + 1, :length])[0]
        nll = [oracle.logsumexp(logits[t]) - logits[t, batch.labels[row, t]] for t in range(length)]
        totals.append(-sum(nll[2:]))
    return np.array(totals), batch.weights.sum(axis=1)


@partial(jax.jit, static_argnames=("model", "loss"))
def run(model, params, pairs, loss=dpo):
    return preference(model, params, pairs, loss=loss)


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_that_of_its_paper(name):
    model, params = draw.model(seed=1)
    reference = draw.params(model, seed=2)
    pairs = with_reference(model, reference, Preferences(rows(0), rows(1)))
    found, weights = run(model, params, pairs, LOSSES[name])
    np.testing.assert_array_equal(weights, np.ones(B))
    (chosen, long), (rejected, short) = (oracle_answers(params, model.config, side) for side in (rows(0), rows(1)))
    before, after = (oracle_answers(reference, model.config, side)[0] for side in (rows(0), rows(1)))
    close(pairs.chosen_reference, before, FLOAT32)
    margin = (chosen - before) - (rejected - after)
    expected = {
        "dpo": -log_sigmoid(0.1 * margin),
        "ipo": (margin - 5.0) ** 2,
        "simpo": -log_sigmoid(2.0 * (chosen / long - rejected / short) - 1.0),
    }
    np.testing.assert_allclose(found, expected[name], rtol=1e-5)


def test_a_model_that_is_its_reference_is_indifferent_and_moves_towards_what_is_chosen():
    model, params = draw.model()
    pairs = with_reference(model, params, Preferences(rows(0), rows(1)))
    close(run(model, params, pairs)[0], np.log(2), FLOAT32)
    optimizer = jf.optim.adamw(1e-3, weight_decay=0.0)
    state = jf.TrainState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params), optimizer.init(params))
    step = jf.make_train_step(model, optimizer, objective=partial(preference, loss=partial(dpo, beta=1.0)))
    for _ in range(20):
        state, metrics = step(state, pairs)
    assert metrics["loss"] < 0.3
    better = with_reference(model, state.params, pairs)
    gained = (better.chosen_reference - pairs.chosen_reference) - (better.rejected_reference - pairs.rejected_reference)
    assert (gained > 1).all()


def test_prompts_and_padding_have_no_part_in_it():
    model, params = draw.model()
    pairs = Preferences(rows(0), rows(1))
    other = np.where(pairs.chosen.weights > 0, pairs.chosen.labels, 28)
    changed = dataclasses.replace(pairs, chosen=dataclasses.replace(pairs.chosen, labels=other))
    np.testing.assert_array_equal(run(model, params, changed)[0], run(model, params, pairs)[0])


def test_the_margin_of_ipo_has_a_goal_and_that_of_dpo_has_none():
    def at(margin):
        one = jnp.ones(1)
        return Answers(one * margin, one * 0, one), Answers(one * 0, one * 0, one)

    assert ipo(*at(5.0), beta=0.1) == 0
    assert ipo(*at(9.0), beta=0.1) == ipo(*at(1.0), beta=0.1) == 16
    assert dpo(*at(9.0)) < dpo(*at(5.0)) < dpo(*at(0.0))
    assert np.isfinite(dpo(*at(-1e6)))
    assert simpo(*at(3.0)) < simpo(*at(0.0))

"""Speculative decoding: the tokens of the model alone, or their distribution, whatever is guessed."""

import functools

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import A, B, model, padded, rows
from tolerances import CACHED

import jaxformer as jf
from jaxformer import speculative
from jaxformer.sampling import chain, no_repeat_ngram, temperature, top_k

NEW = 10


@functools.cache
def other(**fields):
    """A draft that is another model: it is wrong more often than not."""
    made, params = draw.model(seed=5, max_len=32, num_layers=1, tie_embeddings=False, **fields)
    return jf.DraftModel(made, params)


def drafts():
    made, params = model()
    return {
        "itself": jf.DraftModel(made, params),
        "another": other(),
        "look-up": jf.PromptLookUp(),
        "look-up of one": jf.PromptLookUp(1),
    }


@pytest.mark.parametrize("name", drafts())
@pytest.mark.parametrize("guesses", [1, 3, 12])
@pytest.mark.parametrize("left", [0, 2])
def test_greedy_texts_are_those_of_the_model_alone(name, guesses, left):
    made, params = model()
    ids, positions = padded([A, B, [9]], left=left, right=2 - left)
    options = {"positions": positions, "max_new_tokens": NEW}
    wanted = jf.generate(made, params, ids, **options)
    found = jf.speculate(made, params, ids, draft=drafts()[name], guesses=guesses, **options)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    draw.close(found.logprobs, wanted.logprobs, CACHED)
    if name == "itself":  # a guess of the model by itself is wrong only where the text ends
        assert (found.guessed - found.kept <= guesses + 1).all()


@pytest.mark.parametrize("kind", ["dense", "int8"])
@pytest.mark.parametrize("fields", [
    {"positions": "learned"}, {"positions": "alibi"}, {"positions": "relative"}, {"positions": "none"}, {"window": 3},
    {"scan_layers": True},
])  # fmt: skip
def test_every_scheme_of_positions_forgets_what_was_not_kept(fields, kind):
    made, params = model(**fields)
    ids, positions = padded([A, B])
    options = {"positions": positions, "max_new_tokens": NEW, "cache_kind": kind}
    wanted = jf.generate(made, params, ids, **options)
    found = jf.speculate(made, params, ids, draft=other(), guesses=3, **options)
    np.testing.assert_array_equal(found.ids, wanted.ids)


def test_a_text_up_to_the_last_position_is_not_harmed_by_guesses_beyond():
    made, params = model(positions="learned")
    ids = rows(B[:6])
    options = {"max_new_tokens": 26}
    found = jf.speculate(made, params, ids, draft=other(positions="learned"), guesses=8, **options)
    np.testing.assert_array_equal(found.ids, jf.generate(made, params, ids, **options).ids)
    assert np.isfinite(found.logprobs).all()


@pytest.mark.parametrize("name", drafts())
def test_ends_stand_where_the_model_alone_has_them(name):
    made, params = model()
    ids, positions = padded([A, B])
    plain = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    end = int(plain.ids[0, 4])
    options = {"positions": positions, "max_new_tokens": NEW, "eos_id": [end, 28], "pad_id": 1}
    wanted = jf.generate(made, params, ids, **options)
    found = jf.speculate(made, params, ids, draft=drafts()[name], guesses=4, **options)
    assert wanted.lengths[0] < NEW
    for field in ("ids", "lengths"):
        np.testing.assert_array_equal(getattr(found, field), getattr(wanted, field))
    draw.close(found.logprobs, wanted.logprobs, CACHED)


def test_an_encoder_decoder_takes_guesses_too():
    config = draw.tiny(architecture="encoder_decoder")
    made = jf.build(config)
    params, less = (draw.variables(made, draw.ids(1, 2), draw.ids(1, 2), seed=seed)["params"] for seed in (0, 1))
    source, start = draw.ids(2, 5), jnp.zeros((2, 1), jnp.int32)
    options = {"target_ids": start, "max_new_tokens": NEW}
    wanted = jf.generate(made, params, source, **options)
    for draft in (jf.DraftModel(made, less), jf.PromptLookUp(1)):
        found = jf.speculate(made, params, source, draft=draft, guesses=3, **options)
        np.testing.assert_array_equal(found.ids, wanted.ids)


def test_transforms_see_the_text_that_each_guess_would_make():
    made, params = model()
    ids = rows(A, B[:3])
    options = {"max_new_tokens": NEW, "sampler": chain(no_repeat_ngram(1), jf.sampling.greedy)}
    wanted = jf.generate(made, params, ids, **options)
    for draft in drafts().values():
        found = jf.speculate(made, params, ids, draft=draft, guesses=3, **options)
        np.testing.assert_array_equal(found.ids, wanted.ids)


def test_a_row_does_not_depend_on_the_others():
    made, params = model()
    options = {"draft": other(), "guesses": 3, "max_new_tokens": NEW, "key": jax.random.key(3)}
    options["sampler"] = temperature(1.0)
    together = jf.speculate(made, params, rows(A, B[:3]), **options)
    alone = jf.speculate(made, params, rows(A), **options)
    np.testing.assert_array_equal(together.ids[0], alone.ids[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["another", "look-up of one"])
def test_drawn_texts_have_the_distribution_of_the_model_alone(name):
    """A chi-square test of the first three new tokens against their exact probabilities."""
    V, N = 6, 8192
    made, params = draw.model(vocab_size=V, max_len=12)
    small, other_params = draw.model(seed=5, vocab_size=V, max_len=12, num_layers=1)
    draft = jf.DraftModel(small, other_params) if name == "another" else jf.PromptLookUp(1)
    prompt, sampler = [1, 4, 2, 4], chain(temperature(2.0), top_k(4))
    found = jf.speculate(
        made, params, jnp.tile(jnp.array([prompt]), (N, 1)), draft=draft, guesses=2, max_new_tokens=3,
        sampler=sampler, key=jax.random.key(0),
    )  # fmt: skip
    texts = jnp.array([[*prompt, a, b, 0] for a in range(V) for b in range(V)])
    logits = draw.logits(made, params, texts)
    p = np.asarray(jax.nn.softmax(jax.vmap(sampler, in_axes=1, out_axes=1)(logits)), np.float64).reshape(V, V, -1, V)
    joint = p[0, 0, 3][:, None, None] * p[:, 0, 4][:, :, None] * p[:, :, 5]
    counts = np.zeros((V, V, V))
    np.add.at(counts, tuple(np.asarray(found.ids).T), 1)
    assert counts[joint == 0].sum() == 0
    expected = N * joint[joint > 0]
    often = expected > 5
    chi2 = ((counts[joint > 0] - expected) ** 2 / expected)[often].sum()
    freedom = often.sum() - 1
    assert freedom > 20
    # Wilson and Hilferty's normal approximation; 4 standard deviations.
    assert (chi2 / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 4 * np.sqrt(2 / (9 * freedom))
    assert 0.05 < found.kept.sum() / found.guessed.sum() < 0.95


def test_new_numbers_recompile_nothing():
    made, params = model()
    speculative._run.clear_cache()
    for seed, warmth in ((0, 0.5), (1, 1.5)):
        options = {"sampler": temperature(warmth), "key": jax.random.key(seed), "eos_id": seed}
        jf.speculate(made, params, rows(A), draft=jf.PromptLookUp(), max_new_tokens=4, **options)
    assert speculative._run._cache_size() == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"guesses": 0}, "guesses=0 must be an integer of at least 1"),
    ({"draft": jf.PromptLookUp(0)}, "ngram=0 must be an integer of at least 1"),
    ({"cache_kind": "ring"}, "cache_kind='ring' has overwritten what a round must forget"),
    ({"cache_kind": "int8_ring"}, "cache_kind='int8_ring'"),
    ({"max_new_tokens": 30}, "over the context of max_len=32"),
    ({"sampler": temperature(1.0)}, "needs a key"),
    ({"eos_id": 99}, "eos_id=99 is outside of the vocabulary"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options, message):
    made, params = model()
    with pytest.raises(ValueError, match=message):
        jf.speculate(made, params, rows(A), **{"draft": jf.PromptLookUp(), "max_new_tokens": 4} | options)


@pytest.mark.parametrize(("fields", "message"), [
    ({"vocab_size": 28}, "the draft has vocab_size=28 and the model 29"),
    ({"max_len": 5}, "over the context of max_len=5"),
])  # fmt: skip
def test_a_draft_that_does_not_fit_is_refused(fields, message):
    made, params = model()
    small, other_params = draw.model(**fields)
    with pytest.raises(ValueError, match=message):
        jf.speculate(made, params, rows(A), draft=jf.DraftModel(small, other_params), max_new_tokens=4)

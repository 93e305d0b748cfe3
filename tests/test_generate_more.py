"""Ways to generate: stop runs, several samples, loops, sources, caches of earlier turns, and the text so far."""

import dataclasses
import itertools

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import END, NEW, PAD, SAMPLED, SCRIPT, A, B, model, padded, rows, same, scripted
from tolerances import CACHED, INT8

import jaxformer as jf
from jaxformer.cache import KINDS
from jaxformer.decoding import LOOPS
from jaxformer.sampling import allowed, chain, greedy, min_new_tokens, no_repeat_ngram, repetition_penalty


def test_a_row_ends_with_a_run_of_its_new_tokens_and_keeps_it():
    made, params = scripted(SCRIPT)
    prompts = rows([1], [6])
    result = jf.generate(made, params, prompts, max_new_tokens=6, stop=[[END], [7, 8]], pad_id=PAD)
    np.testing.assert_array_equal(result.ids, [[5, END, PAD, PAD, PAD, PAD], [7, 8, PAD, PAD, PAD, PAD]])
    np.testing.assert_array_equal(result.lengths, [2, 2])
    # A run that began in the prompt, or that needs more than the new tokens, is none.
    other = jf.generate(made, params, prompts, max_new_tokens=2, stop=[[6, 7], [1, 5, END]], pad_id=PAD)
    np.testing.assert_array_equal(other.lengths, [2, 2])
    tokens = list(jf.stream(made, params, prompts, max_new_tokens=6, stop=[[END], [7, 8]], pad_id=PAD))
    assert len(tokens) == 2


@pytest.mark.parametrize("options", [{}, SAMPLED, {"eos_id": 9}, {"stop": [[9]], "pad_id": 1}])
def test_both_loops_give_the_same(options):
    made, params = model()
    ids, positions = padded([A, B])
    results = [
        jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, loop=loop, **options) for loop in LOOPS
    ]
    same(*results)


def test_samples_of_a_prompt_are_rows_of_it():
    made, params = model()
    ids, positions = padded([A, B])
    result = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, num_samples=3, **SAMPLED)
    twice = jnp.repeat(jnp.arange(2), 3)
    again = jf.generate(made, params, ids[twice], positions=positions[twice], max_new_tokens=NEW, **SAMPLED)
    np.testing.assert_array_equal(result.ids, again.ids)
    draw.close(result.logprobs, again.logprobs, CACHED)
    assert len(np.unique(np.asarray(result.ids[:3]), axis=0)) == 3


def test_the_gradient_of_generated_logprobs_is_that_of_the_full_pass():
    made, params = model()
    ids = draw.ids(2, 5)
    tokens = jf.generate(made, params, ids, max_new_tokens=4).ids

    def generated(params):
        return jf.generate(made, params, ids, max_new_tokens=4, loop="scan").logprobs.sum()

    def full(params):
        logits = made.apply({"params": params}, jnp.concatenate([ids, tokens], axis=1))[:, 4:-1]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1).sum()

    ours, theirs = jax.grad(generated)(params), jax.grad(full)(params)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs))
    jax.tree.map(lambda a, b: draw.close(a / largest, b / largest, CACHED), ours, theirs)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_decodes_what_a_dense_one_does(kind, loop):
    made, params = model(window=3)
    ids, positions = padded([A, B], right=2)
    dense = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    result = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, cache_kind=kind, loop=loop)
    if kind.startswith("int8"):  # the text may turn at a near tie; until there it is the same
        draw.close(result.logprobs[:, 0], dense.logprobs[:, 0], INT8)
    else:
        np.testing.assert_array_equal(result.ids, dense.ids)
        draw.close(result.logprobs, dense.logprobs, CACHED)


# Sources --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "relative"])
@pytest.mark.parametrize("loop", LOOPS)
def test_an_encoder_decoder_writes_what_its_full_pass_says(scheme, loop):
    made, params = pair(positions=scheme)
    sources, positions = padded([A, B], left=1)
    starts = rows([1], [1])
    result = jf.generate(made, params, sources, positions=positions, target_ids=starts, max_new_tokens=NEW, loop=loop)
    target = starts
    for step in range(NEW):
        logits = draw.logits(made, params, sources, target, positions)[:, -1]
        np.testing.assert_array_equal(result.ids[:, step], logits.argmax(axis=1))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), result.ids[:, step, None], axis=-1)[:, 0]
        draw.close(result.logprobs[:, step], chosen, CACHED)
        target = jnp.concatenate([target, result.ids[:, step : step + 1]], axis=1)
    tokens = list(jf.stream(made, params, sources, positions=positions, target_ids=starts, max_new_tokens=NEW))
    np.testing.assert_array_equal(np.stack(tokens, axis=1), result.ids)


def pair(**fields):
    made = jf.build(draw.tiny(architecture="encoder_decoder", max_len=32, tie_embeddings=False, **fields))
    shapes = jax.eval_shape(made.init, jax.random.key(0), draw.ids(1, 2), draw.ids(1, 2))["params"]
    return made, draw.at_random(shapes, seed=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "an encoder-decoder continues target_ids"),
        ({"target_ids": rows([1])}, "there are 2 sources and 1 targets"),
        ({"target_ids": rows([40], [1])}, "token id 40 is outside of the vocabulary of 31"),
        (
            {"target_ids": rows([1], [1]), "max_new_tokens": 32},
            "prompt of 1 and 32 new tokens are 33, over .* max_len=32",
        ),
    ],
)
def test_a_target_that_does_not_fit_is_refused(change, message):
    made, params = pair(target_vocab_size=31)
    with pytest.raises(ValueError, match=message):
        jf.generate(made, params, rows(A, A), **{"max_new_tokens": 2} | change)


# Turns ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "ring"])
def test_a_second_turn_over_the_cache_is_one_conversation(kind):
    made, params = model(window=4)
    first, positions = padded([A, B])
    empty = jf.init_cache(made.config, 2, 32, kind=kind)
    one = jf.generate(made, params, first, positions=positions, max_new_tokens=4, cache=empty)
    assert int(empty.length) == 0
    more = draw.ids(2, 3, seed=5)
    turn = jnp.concatenate([one.ids[:, -1:], more], axis=1)
    two = jf.generate(made, params, turn, max_new_tokens=4, cache=one.cache)
    for number, prompt in enumerate((A, B)):
        whole = [*prompt, *one.ids[number].tolist(), *more[number].tolist()]
        expected = jf.generate(made, params, rows(whole), max_new_tokens=4)
        np.testing.assert_array_equal(two.ids[number], expected.ids[0])
        draw.close(two.logprobs[number], expected.logprobs[0], CACHED)
    assert jf.generate(made, params, first, positions=positions, max_new_tokens=4).cache is None


def test_a_turn_that_does_not_fit_the_cache_is_refused():
    made, params = model()
    cache = jf.init_cache(made.config, 1, 5)
    with pytest.raises(ValueError, match=r"holds 0 tokens; a prompt of 3 and 4 new tokens need 6 slots, over its .* 5"):
        jf.generate(made, params, rows(A), max_new_tokens=4, cache=cache)
    assert jf.generate(made, params, rows(A), max_new_tokens=3, cache=cache).lengths == 3
    with pytest.raises(ValueError, match="the cache has 1 rows and ids have 2"):
        jf.generate(made, params, rows(A, A), max_new_tokens=1, cache=cache)


# Text so far ----------------------------------------------------------------------------------------------------------


def test_transforms_see_the_text_of_their_row_without_padding():
    made, params = model()
    sampler = chain(repetition_penalty(3.0), no_repeat_ngram(2), greedy)
    ids, positions = padded([A, B], right=3)
    together = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, sampler=sampler)
    free = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    assert (together.ids != free.ids).any()
    for number, prompt in enumerate((A, B)):
        alone = jf.generate(made, params, rows(prompt), max_new_tokens=NEW, sampler=sampler)
        np.testing.assert_array_equal(together.ids[number], alone.ids[0])
        text = [*prompt, *alone.ids[0].tolist()]
        pairs = list(itertools.pairwise(text))[len(prompt) - 1 :]
        assert len(set(pairs)) == len(pairs)


def test_an_end_is_kept_back_until_its_time():
    made, params = scripted(SCRIPT)
    options = {"max_new_tokens": 6, "eos_id": END, "pad_id": PAD}
    early = jf.generate(made, params, rows([1]), **options)
    late = jf.generate(made, params, rows([1]), sampler=chain(min_new_tokens(4, END), greedy), **options)
    assert int(early.lengths[0]) == 2
    assert int(late.lengths[0]) >= 4


def test_a_row_of_which_nothing_is_left_has_no_probability():
    made, params = model()
    nothing = chain(allowed(lambda history: jnp.zeros(29, bool) | (history.lengths[:, None] < 5)), greedy)
    result = jf.generate(made, params, rows(A, A), max_new_tokens=4, sampler=nothing)
    np.testing.assert_array_equal(np.isnan(result.logprobs), [[False, False, True, True]] * 2)


# Batches --------------------------------------------------------------------------------------------------------------


def test_prompts_of_one_bucket_share_a_program():
    ids, positions = jf.pad_prompts([A, B], multiple=5, pad_id=9)
    np.testing.assert_array_equal(ids, [[9] * 7 + A, [9] * 3 + B])
    np.testing.assert_array_equal(positions, [[-1] * 7 + [0, 1, 2], [-1] * 3 + [*range(7)]])
    made, params = model()
    result = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    for number, prompt in enumerate((A, B)):
        np.testing.assert_array_equal(
            result.ids[number], jf.generate(made, params, rows(prompt), max_new_tokens=NEW).ids[0]
        )
    for bad in ([], [[1], []]):
        with pytest.raises(ValueError, match="there must be a prompt, each of at least one token"):
            jf.pad_prompts(bad)


def test_a_generation_is_a_pytree():
    made, params = model()
    result = jax.jit(lambda ids: jf.generate(made, params, ids, max_new_tokens=2))(rows(A))
    assert {field.name for field in dataclasses.fields(result)} == {"ids", "lengths", "logprobs", "cache"}

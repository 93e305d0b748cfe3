"""Decoding over a cache: the tokens of decoding without one, whatever else is in the batch."""

import functools

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draw import close
from tolerances import BFLOAT16, CACHED

import jaxformer as jf
from jaxformer.sampling import chain, temperature, top_p

SCHEMES = ("none", "learned", "sinusoidal", "rotary", "alibi", "relative")
A, B = [3, 17, 8], [5, 5, 20, 11, 2, 9, 24]
NEW = 8
SAMPLED = {"sampler": chain(temperature(1.5), top_p(0.95)), "key": jax.random.key(7)}


@functools.cache
def model(positions="rotary", **fields):
    """A model whose attention is strong enough that its greedy text is not one token for ever."""
    made, params = draw.model(seed=2, max_len=32, positions=positions, **{"tie_embeddings": False} | fields)
    factors = {"q_proj/kernel": 2, "k_proj/kernel": 2, "o_proj/kernel": 3, "final_norm/bias": 0}

    def one(path, leaf):
        return leaf * factors.get("/".join(key.key for key in path[-2:]), 1)

    return made, jax.tree_util.tree_map_with_path(one, params)


def rows(*lists):
    return jnp.asarray(lists, jnp.int32)


def padded(prompts, *, left=0, right=0, fill=0):
    """The prompts in one batch of so many columns more than the longest one, on the left or on the right of it."""
    width = left + max(map(len, prompts)) + right
    ids, positions = np.full((len(prompts), width), fill), np.full((len(prompts), width), -1)
    for row, prompt in enumerate(prompts):
        start = width - right - len(prompt) if left or not right else left
        ids[row, start : start + len(prompt)] = prompt
        positions[row, start : start + len(prompt)] = np.arange(len(prompt))
    return jnp.asarray(ids, jnp.int32), jnp.asarray(positions, jnp.int32)


def same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def row(made, number):
    return jax.tree.map(lambda leaf: leaf[number], made)


def alone(made, params, prompt, **options):
    return row(jf.generate(made, params, rows(prompt), max_new_tokens=NEW, **options), 0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_decoding_is_the_oracles_without_a_cache(scheme):
    made, params = model(scheme)
    seen = set()
    for prompt in (A, B):
        expected = oracle.greedy(params, made.config.to_dict(), rows(prompt), NEW)
        seen |= set(expected.ravel().tolist())
        result = jf.generate(made, params, rows(prompt), max_new_tokens=NEW)
        np.testing.assert_array_equal(result.ids, expected)
        assert result.lengths.tolist() == [NEW]
    assert len(seen) > 2


@pytest.mark.parametrize("fields", [{"scan_layers": True}, {"residual": "post"}, {"tie_embeddings": True}])
def test_any_kind_of_stack_decodes_as_without_a_cache(fields):
    made, params = model(**fields)
    ids = draw.ids(2, 4)
    loop = jf.trees.unstack_layers(params) if made.config.scan_layers else params
    expected = oracle.greedy(loop, made.config.to_dict(), ids, NEW)
    np.testing.assert_array_equal(jf.generate(made, params, ids, max_new_tokens=NEW).ids, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padding", [{}, {"right": 4}, {"left": 4}])
def test_a_rows_tokens_are_those_it_has_alone_whatever_pads_it(scheme, padding):
    made, params = model(scheme)
    ids, positions = padded([A, B], **padding)
    together = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    for number, prompt in enumerate((A, B)):
        one = alone(made, params, prompt)
        np.testing.assert_array_equal(together.ids[number], one.ids)
        close(together.logprobs[number], one.logprobs, CACHED)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_stored_in_padding_change_not_a_bit(scheme):
    made, params = model(scheme)
    ids, positions = padded([A, B], left=4)
    first = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    other = jnp.where(positions < 0, 9, ids)
    assert (other != ids).any()
    same(jf.generate(made, params, other, positions=positions, max_new_tokens=NEW), first)


def check_logprobs(made, params, result):
    for number, prompt in enumerate((A, B)):
        text = rows([*prompt, *result.ids[number].tolist()])
        expected = np.log(oracle.softmax(oracle.decoder(params, made.config.to_dict(), text)))[0]
        at = np.arange(len(prompt) - 1, len(prompt) + NEW - 1)
        close(result.logprobs[number], expected[at, result.ids[number]], CACHED)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logprobs_are_those_of_the_full_forward_pass(scheme):
    made, params = model(scheme)
    ids, positions = padded([A, B])
    check_logprobs(made, params, jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW))


def test_logprobs_are_the_models_own_before_any_transform():
    made, params = model()
    ids, positions = padded([A, B])
    likeliest = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    result = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, **SAMPLED)
    assert (result.ids != likeliest.ids).any()
    check_logprobs(made, params, result)


def test_bfloat16_decoding_is_the_full_forward_pass_to_its_tolerance():
    made, params = model(dtype="bfloat16")
    ids = draw.ids(2, 5)
    result = jf.generate(made, params, ids, max_new_tokens=NEW)
    text = jnp.concatenate([ids, result.ids], axis=1)[:, :-1]
    expected = jax.nn.log_softmax(draw.logits(made, params, text))[:, -NEW:]
    close(result.logprobs, jnp.take_along_axis(expected, result.ids[..., None], axis=-1)[..., 0], BFLOAT16)


def scripted(following):
    """A model whose likeliest next token is `following[token]`: one-hot vectors, silent layers, and a table as head."""
    V = len(following)
    made = jf.build(draw.tiny(vocab_size=V, max_len=32, d_model=V, d_head=2, norm="rmsnorm", tie_embeddings=False))
    params = jax.tree.map(jnp.zeros_like, draw.params(made))
    params["decoder"]["final_norm"]["scale"] += 1
    params["embed"]["token"]["embedding"] += jnp.eye(V)
    params["lm_head"]["kernel"] += jax.nn.one_hot(jnp.asarray(following), V)
    return made, params


END, TURN, PAD = 2, 3, 0
SCRIPT = [0, 5, 1, 1, 5, END, 7, 8, END, TURN]
"""1 -> 5 -> END;  6 -> 7 -> 8 -> END;  9 -> TURN."""


def test_every_row_stops_at_its_own_end_and_padding_follows():
    made, params = scripted(SCRIPT)
    result = jf.generate(made, params, rows([1], [6]), max_new_tokens=10, eos_id=END, pad_id=PAD)
    np.testing.assert_array_equal(result.ids, [[5, END] + [PAD] * 8, [7, 8, END] + [PAD] * 7])
    np.testing.assert_array_equal(result.lengths, [2, 3])
    live = np.arange(10) < np.asarray(result.lengths)[:, None]
    assert not np.asarray(result.logprobs)[~live].any()
    assert (np.asarray(result.logprobs)[live] < 0).all()


def test_any_of_several_ends_stops_a_row_and_padding_is_the_first_of_them():
    made, params = scripted(SCRIPT)
    result = jf.generate(made, params, rows([1], [9]), max_new_tokens=4, eos_id=[TURN, END])
    np.testing.assert_array_equal(result.ids, [[5, END, TURN, TURN], [TURN] * 4])
    np.testing.assert_array_equal(result.lengths, [2, 1])
    only = jf.generate(made, params, rows([1], [9]), max_new_tokens=4, eos_id=END, pad_id=PAD)
    np.testing.assert_array_equal(only.ids, [[5, END, PAD, PAD], [TURN, 1, 5, END]])
    never = jf.generate(made, params, rows([1], [9]), max_new_tokens=4)
    np.testing.assert_array_equal(never.ids, [[5, END, 1, 5], [TURN, 1, 5, END]])
    np.testing.assert_array_equal(never.lengths, [4, 4])


def test_an_end_in_the_prompt_ends_nothing_and_is_not_hidden():
    made, params = model()
    free = alone(made, params, B)
    absent = next(token for token in B if token not in free.ids)
    same(alone(made, params, B, eos_id=absent), free)
    same(alone(made, params, B, eos_id=absent, pad_id=B[0]), free)


def test_until_its_end_a_row_is_what_it_is_without_one():
    """Though other rows end before it; and what follows the end of a row is seen by none."""
    made, params = model()
    ids, positions = padded([A, B])
    free = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW)
    end = int(free.ids[0, 2])
    result = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, eos_id=end, pad_id=1)
    for number in range(2):
        tokens = free.ids[number].tolist()
        length = tokens.index(end) + 1 if end in tokens else NEW
        assert result.lengths[number] == length
        np.testing.assert_array_equal(result.ids[number], tokens[:length] + [1] * (NEW - length))
        np.testing.assert_array_equal(result.logprobs[number, :length], free.logprobs[number, :length])
        assert not result.logprobs[number, length:].any()
    assert 1 <= result.lengths[0] <= 3


def test_rows_of_padding_generate_nothing_and_change_nothing():
    made, params = scripted(SCRIPT)
    ids, positions = rows([1, 1], [6, 6], [6, 6]), rows([-1, -1], [0, 1], [-1, -1])
    options = {"max_new_tokens": 6, "eos_id": END, "pad_id": PAD}
    result = jf.generate(made, params, ids, positions=positions, **options)
    np.testing.assert_array_equal(result.lengths, [0, 3, 0])
    np.testing.assert_array_equal(result.ids[jnp.asarray([0, 2])], PAD)
    np.testing.assert_array_equal(result.logprobs[jnp.asarray([0, 2])], 0)
    np.testing.assert_array_equal(result.ids[1], [7, 8, END, PAD, PAD, PAD])
    assert len(list(jf.stream(made, params, ids, positions=positions, **options))) == 3
    nothing = list(jf.stream(made, params, ids, positions=jnp.full((3, 2), -1), **options))
    np.testing.assert_array_equal(nothing, [[PAD] * 3])


def test_a_rows_sampled_tokens_do_not_depend_on_the_other_rows():
    made, params = model()
    first, other, one = (
        jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, **SAMPLED)
        for ids, positions in (padded([A, B]), padded([A, B[::-1]]), padded([A]))
    )
    np.testing.assert_array_equal(first.ids[0], other.ids[0])
    np.testing.assert_array_equal(first.ids[0], one.ids[0])
    assert (first.logprobs[1] != other.logprobs[1]).all()


def test_the_same_key_gives_the_same_tokens_and_another_key_others():
    made, params = model()
    ids = rows(A, A)
    runs = [
        jf.generate(made, params, ids, max_new_tokens=NEW, sampler=temperature(3.0), key=jax.random.key(seed))
        for seed in (0, 0, 1)
    ]
    same(*runs[:2])
    assert (runs[0].ids != runs[2].ids).any()
    assert (runs[0].ids[0] != runs[0].ids[1]).any()  # nor do rows of one prompt share their draws
    assert len(np.unique(runs[0].ids)) > 4  # nor do steps


@pytest.mark.parametrize("options", [{}, SAMPLED, {"eos_id": 9}, SAMPLED | {"eos_id": [9, 4], "pad_id": 0}])
def test_a_stream_is_the_generation_token_for_token(options):
    made, params = model()
    ids, positions = padded([A, B])
    whole = jf.generate(made, params, ids, positions=positions, max_new_tokens=NEW, **options)
    tokens = list(jf.stream(made, params, ids, positions=positions, max_new_tokens=NEW, **options))
    np.testing.assert_array_equal(np.stack(tokens, axis=1), whole.ids[:, : len(tokens)])
    assert len(tokens) == whole.lengths.max()


def test_a_stream_ends_when_every_row_has():
    made, params = scripted(SCRIPT)
    tokens = list(jf.stream(made, params, rows([1], [6]), max_new_tokens=30, eos_id=END, pad_id=PAD))
    np.testing.assert_array_equal(tokens, [[5, 7], [END, 8], [PAD, END]])

"""Scores of texts against the oracle's softmax, whatever stands beside them in the batch."""

import importlib

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import CACHED

import jaxformer as jf

module = importlib.import_module("jaxformer.score")  # jf.score is the function of this name
LENGTH = 9


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 4 tokens: several of them, and the last one is not full."""
    before, module.BLOCK = module.BLOCK, 4
    module._score.clear_cache()
    yield
    module.BLOCK = before
    module._score.clear_cache()


def expected(made, params, ids):
    """The log-probability of each token of one text but the first."""
    ids = np.asarray(ids)[None]
    logprobs = np.log(oracle.softmax(oracle.decoder(params, made.config.to_dict(), ids)))[0]
    return np.array([0.0, *(logprobs[t - 1, ids[0, t]] for t in range(1, ids.shape[1]))])


@pytest.mark.parametrize("scheme", ["learned", "rotary", "alibi"])
def test_a_score_is_the_oracles_log_probability_of_every_token_but_the_first(scheme):
    made, params = draw.model(positions=scheme)
    ids = draw.ids(3, LENGTH)
    found = jf.score(made, params, ids)
    wanted = np.stack([expected(made, params, row) for row in ids])
    draw.close(found.logprobs, wanted, CACHED)
    np.testing.assert_array_equal(found.counted, np.arange(LENGTH)[None].repeat(3, 0) > 0)
    perplexities = np.exp(-wanted.sum(axis=1) / (LENGTH - 1))
    np.testing.assert_allclose(found.perplexities, perplexities, rtol=1e-4)
    np.testing.assert_allclose(found.perplexity, np.exp(-wanted.sum() / (3 * (LENGTH - 1))), rtol=1e-4)


def test_the_size_of_the_batch_changes_nothing():
    made, params = draw.model()
    ids = draw.ids(8, LENGTH)
    together = jf.score(made, params, ids)
    for number in (0, 5):
        alone = jf.score(made, params, ids[number : number + 1])
        # XLA may sum in another order for another shape: a few units in the last place, of numbers around -10.
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[number], rtol=1e-6, atol=1e-6)


def test_padding_is_not_counted_and_changes_nothing():
    made, params = draw.model()
    text = draw.ids(1, 5)[0]
    plain = jf.score(made, params, text[None]).logprobs[0]
    at = [
        [-1, -1, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, -1, -1],
        [0, -1, 1, 2, -1, 3, 4],
        [-1, -1, -1, -1, -1, -1, 0],
        [-1] * 7,
    ]
    positions = jnp.asarray(at)
    ids = jnp.where(positions < 0, 9, text[jnp.maximum(positions, 0)])
    found = jf.score(made, params, ids, positions=positions)
    for row in range(3):
        draw.close(found.logprobs[row][positions[row] >= 0], plain, CACHED)
        assert not found.logprobs[row][positions[row] < 0].any()
    np.testing.assert_array_equal(found.counted, positions > 0)
    np.testing.assert_array_equal(np.isnan(found.perplexities), [False, False, False, True, True])
    total = 3 * np.asarray(plain).sum() / 12
    np.testing.assert_allclose(found.perplexity, np.exp(-total), rtol=1e-5)


def test_packed_documents_have_the_scores_that_they_have_alone():
    made, params = draw.model()
    ids, segments = draw.ids(1, 10), jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])
    found = jf.score(made, params, ids, segments=segments)
    for at in (slice(0, 4), slice(4, 9)):
        draw.close(found.logprobs[0, at], jf.score(made, params, ids[:, at]).logprobs[0], CACHED)
    np.testing.assert_array_equal(found.counted[0], [0, 1, 1, 1, 0, 1, 1, 1, 1, 0])


@pytest.mark.parametrize(("window", "stride", "batch_size"), [(8, 3, 1), (8, 7, 4), (5, 1, 3), (16, 5, 2), (6, 4, 1)])
def test_a_long_text_is_scored_once_with_the_context_that_was_promised(window, stride, batch_size):
    made, params = draw.model(positions="learned")
    ids = np.asarray(draw.ids(1, 23)[0])
    found = jf.score_long(made, params, ids, stride=stride, window=window, batch_size=batch_size)
    wanted, scored = np.zeros(23), {0}
    start = 0
    while max(scored) < 22:
        part = expected(made, params, ids[start : start + window])
        for t, logprob in enumerate(part):
            if t and start + t not in scored:
                assert t >= window - stride or start == 0
                wanted[start + t] = logprob
                scored.add(start + t)
        start += stride
    draw.close(found.logprobs[0], wanted, CACHED)
    np.testing.assert_array_equal(found.counted[0], np.arange(23) > 0)
    assert np.isfinite(found.perplexity)


def test_a_text_within_the_window_is_scored_as_a_whole():
    made, params = draw.model()
    ids = draw.ids(1, 7)
    long = jf.score_long(made, params, ids[0], stride=4)
    draw.close(long.logprobs, jf.score(made, params, ids).logprobs, CACHED)


def test_all_windows_share_a_program_and_no_logits_of_the_whole_text_exist():
    made, params = draw.model(max_len=16)
    module._score.clear_cache()
    jf.score_long(made, params, draw.ids(1, 50)[0], stride=5, window=8)
    assert module._score._cache_size() == 1
    text = module._score.lower(made, params, draw.ids(2, 16), None, None).as_text()
    assert "2x4x29xf32" in text  # a block
    assert "2x16x29xf32" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [[1]]}, "rows are of 1 tokens; there must be at least 2, of which the first is given"),
        ({"ids": [[1] * 17]}, "rows are of 17 tokens; .*max_len=16; use score_long"),
        ({"ids": [[1, 29]]}, "token id 29 is outside of the vocabulary of 29"),
        (
            {"ids": [[1, 2]], "positions": jnp.asarray([[15, 16]])},
            "position 16 is beyond the learned table of max_len=16",
        ),
    ],
)
def test_what_has_no_score_is_refused(change, message, unchecked):
    made, params = draw.model(positions="learned")
    with pytest.raises(ValueError, match=message):
        jf.score(made, params, jnp.asarray(change.pop("ids")), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 16}, "stride=16 .*1 <= stride < window"),
        ({"stride": 0}, "stride=0"),
        ({"stride": 4, "window": 17}, "window=17.* window <= max_len=16"),
        ({"stride": 4, "batch_size": 0}, "batch_size=0"),
        ({"stride": 4, "ids": [1]}, "at least 2 tokens"),
        ({"stride": 4, "ids": [1, 29]}, "token id 29"),
    ],
)
def test_windows_that_cannot_be_are_refused(change, message):
    made, params = draw.model()
    with pytest.raises(ValueError, match=message):
        jf.score_long(made, params, np.asarray(change.pop("ids", [1, 2, 3])), **change)


def test_an_encoder_has_no_score(unchecked):
    made = jf.build(draw.tiny(architecture="encoder", head="masked_lm"))
    for call in (jf.score, lambda *args: jf.score_long(*args, stride=2)):
        with pytest.raises(ValueError, match="Encoder gives no token a probability from those before it"):
            call(made, {}, draw.ids(1, 4))


def test_a_score_has_a_gradient_and_goes_through_jit():
    made, params = draw.model()
    ids = draw.ids(2, LENGTH)
    loss = jax.jit(jax.grad(lambda params: -jf.score(made, params, ids).logprobs.sum()))(params)

    def plain(params):
        logits = made.apply({"params": params}, ids)[:, :-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1).sum()

    jax.tree.map(lambda a, b: draw.close(a, b, CACHED), loss, jax.jit(jax.grad(plain))(params))

"""Beam search against the oracle's, against all texts there are, and what must hold of every search."""

import itertools
import os

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_pretrained import GOLDEN, loaded
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer import beam

V, NEW, PROMPT = 7, 4, [3, 1, 5]
FIELDS = {"vocab_size": V, "max_len": 12}


def steep(**fields):
    """A model whose next tokens are far from equally likely."""
    model, params = draw.model(**FIELDS | fields)
    return model, jax.tree.map(lambda x: 2 * x, params)


def searched(model, params, prompts, **options):
    return jf.beam_search(model, params, jnp.asarray(prompts), max_new_tokens=NEW, **options)


def texts(beams, row=0):
    """(score, log-probability, tokens) of one prompt."""
    leaves = (np.asarray(leaf[row]) for leaf in (beams.scores, beams.logprobs, beams.ids, beams.lengths))
    return [(score, logprob, ids[:length].tolist()) for score, logprob, ids, length in zip(*leaves, strict=True)]


def next_logprobs(model, params):
    config = model.config.to_dict()

    def of(text):
        logits = oracle.decoder(params, config, np.array([text]))[0, -1]
        return logits - np.logaddexp.reduce(logits)

    return of


def agree(found, wanted):
    assert [text for *_, text in found] == [text for *_, text in wanted]
    draw.close([pair[:2] for pair in found], [pair[:2] for pair in wanted], FLOAT32 * 10)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("eos", [(), (2,), (2, 4, 6)])
def test_the_texts_are_the_oracles(eos, penalty):
    model, params = steep()
    options = {"num_beams": 3, "num_texts": 3, "eos_id": eos or None, "length_penalty": penalty}
    found = texts(searched(model, params, [PROMPT], **options))
    agree(found, oracle.beam_search(next_logprobs(model, params), PROMPT, NEW, 3, eos, penalty))


def test_beams_enough_for_all_texts_find_the_best_of_all():
    """All texts of three tokens of which the third ends a text, and those that end before."""
    model, params = draw.model(vocab_size=3, max_len=12)
    of = next_logprobs(model, params)
    every = []
    for text in itertools.product(range(3), repeat=3):
        whole = text[: text.index(2) + 1] if 2 in text else text
        total = sum(of([*[1, 0], *whole[:i]])[token] for i, token in enumerate(whole))
        every.append((total / len(whole), list(whole)))
    best = max(every)
    found = jf.beam_search(model, params, jnp.array([[1, 0]]), max_new_tokens=3, num_beams=12, eos_id=2)
    assert texts(found)[0][2] == best[1]
    draw.close(found.scores[0, 0], best[0], FLOAT32 * 10)


def test_one_beam_is_greedy():
    model, params = steep()
    prompts = draw.ids(3, 4, vocab_size=V)
    greedy = jf.generate(model, params, prompts, max_new_tokens=NEW)
    found = searched(model, params, prompts, num_beams=1, length_penalty=0.0)
    np.testing.assert_array_equal(found.ids[:, 0], greedy.ids)
    draw.close(found.logprobs[:, 0], greedy.logprobs.sum(axis=1), FLOAT32 * 10)


@pytest.mark.parametrize("kind", ["dense", "int8", "ring"])
@pytest.mark.parametrize("scan", [False, True])
def test_log_probabilities_are_those_of_the_whole_text(kind, scan):
    """The cache that a text is left with is its own, in every kind: an exchange of rows would show here."""
    fields = {"scan_layers": scan, "window": 3 if kind == "ring" else None}
    model, params = steep(**fields)
    found = searched(model, params, [PROMPT, PROMPT[::-1]], num_beams=4, num_texts=4, cache_kind=kind)
    for row, prompt in enumerate([PROMPT, PROMPT[::-1]]):
        for _, total, text in texts(found, row):
            whole = jnp.array([prompt + text])
            logprobs = jf.score(model, params, whole).logprobs[0, len(prompt) :]
            draw.close(total, logprobs.sum(), 0.2 if kind == "int8" else FLOAT32 * 10)


def test_other_rows_and_padding_change_nothing():
    model, params = steep()
    prompts = [[3, 1, 5], [2, 6], [4, 4, 1, 0, 5]]
    ids, positions = jf.pad_prompts(prompts)
    options = {"max_new_tokens": NEW, "num_beams": 3, "num_texts": 3, "eos_id": 2}
    together = jf.beam_search(model, params, ids, positions=positions, **options)
    right = [np.flip(x, 1) for x in (ids, positions)]
    order = np.argsort(right[1] < 0, axis=1, kind="stable")[:, ::-1]
    mixed = [np.take_along_axis(x, order, axis=1) for x in right]
    again = jf.beam_search(model, params, mixed[0], positions=mixed[1], **options)
    for row, prompt in enumerate(prompts):
        alone = texts(jf.beam_search(model, params, jnp.array([prompt]), **options))
        agree(texts(together, row), alone)
        agree(texts(again, row), alone)


def test_a_row_of_padding_has_no_text():
    model, params = steep()
    positions = np.array([[0, 1, 2], [-1, -1, -1]])
    found = searched(model, params, [PROMPT] * 2, positions=positions, num_beams=2, num_texts=2, eos_id=2, pad_id=6)
    assert found.lengths[1].tolist() == [0, 0]
    assert (np.asarray(found.ids[1]) == 6).all()
    assert np.isneginf(found.scores[1]).all()
    agree(texts(found), texts(searched(model, params, [PROMPT], num_beams=2, num_texts=2, eos_id=2)))


def test_an_encoder_decoder_is_searched_too():
    fields = {"architecture": "encoder_decoder", "target_vocab_size": V}
    config = draw.tiny(**FIELDS | fields)
    model = jf.build(config)
    params = draw.variables(model, draw.ids(1, 2), draw.ids(1, 2))["params"]
    source = draw.ids(2, 5, vocab_size=V)
    start = jnp.zeros((2, 1), jnp.int32)
    found = jf.beam_search(
        model, params, source, target_ids=start, max_new_tokens=NEW, num_beams=3, num_texts=3, eos_id=2
    )

    for row in range(2):

        def of(text, row=row):
            logits = oracle.encoder_decoder(params, config.to_dict(), source[row : row + 1], np.array([text]))[0, -1]
            return logits - np.logaddexp.reduce(logits)

        agree(texts(found, row), oracle.beam_search(of, [0], NEW, 3, (2,)))


def test_transforms_see_each_text_and_rule_out_tokens():
    model, params = steep()
    transform = jf.sampling.no_repeat_ngram(1)
    found = searched(model, params, [PROMPT], num_beams=3, num_texts=3, transform=transform)

    plain = next_logprobs(model, params)

    def of(text):
        logprobs = plain(text)
        logprobs[text] = -np.inf
        return logprobs

    agree(texts(found), oracle.beam_search(of, PROMPT, NEW, 3))
    for *_, text in texts(found):
        assert len({*PROMPT, *text}) == len(PROMPT) + len(text)


def test_a_search_ends_early_where_asked():
    """At a step that leaves as many finished texts as beams; otherwise it goes on, and may find better ones."""
    model, params = draw.model(seed=1, **FIELDS)
    eos, of = (0, 1, 2), next_logprobs(model, params)
    options = {"num_beams": 2, "num_texts": 2, "eos_id": eos, "length_penalty": 3.0}
    early = searched(model, params, [PROMPT], early_stopping=True, **options)
    steps = next(n for n in range(1, NEW) if len(oracle.beam_search(of, PROMPT, n, 2, eos, 3.0, True)) == 2)
    agree(texts(early), oracle.beam_search(of, PROMPT, steps, 2, eos, 3.0, True))
    late = searched(model, params, [PROMPT], **options)
    agree(texts(late), oracle.beam_search(of, PROMPT, NEW, 2, eos, 3.0))
    assert late.scores[0, 0] > early.scores[0, 0]


def test_new_numbers_recompile_nothing():
    model, params = steep()
    beam._run.clear_cache()
    for penalty, eos, early in ((1.0, 2, False), (0.5, 3, True)):
        searched(model, params, [PROMPT], num_beams=2, length_penalty=penalty, eos_id=eos, early_stopping=early)
    assert beam._run._cache_size() == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"num_beams": 0}, "num_beams=0 must be an integer of at least 1"),
    ({"num_beams": 2, "num_texts": 3}, "num_texts=3 must be an integer from 1 to num_beams=2"),
    ({"num_beams": 2, "eos_id": 7}, "eos_id=7 is outside of the vocabulary of 7"),
    ({"num_beams": 2, "target_ids": np.zeros((1, 1), int)}, "only an encoder-decoder has a target"),
    ({"num_beams": 2, "positions": np.zeros((1, 2), int)}, "positions are int"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options, message, unchecked):
    model, params = steep()
    with pytest.raises(ValueError, match=message):
        searched(model, params, [PROMPT], **options)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_texts_are_those_of_transformers(name, penalty):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    mine = loaded(name)
    prompt = np.asarray(draw.ids(2, 6, vocab_size=50), np.int64)
    options = {"max_new_tokens": 6, "num_beams": 3, "length_penalty": penalty}
    two = mine.config.architecture == "encoder_decoder"
    kind = transformers.AutoModelForSeq2SeqLM if two else transformers.AutoModelForCausalLM
    theirs = kind.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
    asked = {"num_return_sequences": 3, "early_stopping": "never", "do_sample": False, "eos_token_id": 5}
    # Its cache counts the encoder's layers for the decoder's.
    asked |= {
        "use_cache": False,
        "pad_token_id": 5,
        "forced_eos_token_id": None,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    wanted = theirs.generate(torch.from_numpy(prompt), attention_mask=torch.ones(2, 6).long(), **options | asked)
    target = {"target_ids": jnp.full((2, 1), mine.special.start)} if two else {}
    found = jf.beam_search(mine.model, mine.params, jnp.asarray(prompt), num_texts=3, eos_id=5, **options, **target)
    np.testing.assert_array_equal(found.ids.reshape(6, 6), wanted.sequences[:, -6:])
    draw.close(found.scores.reshape(6), wanted.sequences_scores, 1e-4)

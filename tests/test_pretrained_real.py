"""Real models, whose files are looked for and never fetched: run `pytest -m real` with them in place."""

import importlib.metadata
import json
import os
from pathlib import Path

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

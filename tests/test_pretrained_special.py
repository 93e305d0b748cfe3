"""Tokens that begin, end and fill a text: read from both files that may say them, checked, and written again."""

import json

import pytest
from test_pretrained import copied, loaded

import jaxformer as jf
from jaxformer.convert.special import SpecialIds, read_special


@pytest.mark.parametrize(("config", "generation", "wanted"), [
    ({}, {}, SpecialIds()),
    ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, {}, SpecialIds(1, (2,), 0)),
    ({"eos_token_id": 2}, {"eos_token_id": [4, 5]}, SpecialIds(eos=(4, 5))),
    ({"eos_token_id": [4]}, {"eos_token_id": None}, SpecialIds(eos=(4,))),
    ({"decoder_start_token_id": 0, "pad_token_id": 0}, {}, SpecialIds(pad=0, start=0)),
    ({"pad_token_id": -1, "eos_token_id": [7, 8, 50256]}, {}, SpecialIds(eos=(7, 8))),
])  # fmt: skip
def test_ids_are_read_from_both_files(config, generation, wanted):
    assert read_special(config, generation, 9) == wanted


@pytest.mark.parametrize("source", [
    {"eos_token_id": "2"}, {"eos_token_id": [2, None]}, {"bos_token_id": True}, {"pad_token_id": 1.0},
    {"bos_token_id": [1]}, {"decoder_start_token_id": {}},
])  # fmt: skip
def test_what_is_no_id_is_refused(source, tmp_path):
    key = next(iter(source))
    with pytest.raises(ValueError, match=f"{key}=.* is not a token id"):
        jf.load(copied("llama", tmp_path / "model", **source))


def test_the_file_for_generation_counts_first_and_what_was_read_is_written(tmp_path):
    folder = copied("t5", tmp_path / "model", eos_token_id=1, bos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    model = jf.load(folder)
    assert model.special == SpecialIds(bos=3, eos=(1, 5), pad=0, start=0)
    jf.save(tmp_path / "again", model.config, model.params, special=model.special)
    assert jf.load(tmp_path / "again").special == model.special
    jf.save(tmp_path / "plain", model.config, model.params)
    assert jf.load(tmp_path / "plain").special == SpecialIds(pad=0, start=0)


def test_a_damaged_file_for_generation_is_refused(tmp_path):
    folder = copied("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config\.json is a JSON list"):
        jf.load(folder)


def test_one_id_that_ends_texts_is_written_as_a_number(tmp_path):
    model = loaded("llama")
    jf.save(tmp_path, model.config, model.params, special=SpecialIds(eos=(3,), bos=1))
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["eos_token_id"], said["bos_token_id"]) == (3, 1)

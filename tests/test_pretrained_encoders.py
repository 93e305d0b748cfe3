"""Published encoders with each of their heads: the outputs and states of `transformers`, and files that come back."""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import draw
import jax.numpy as jnp
import numpy as np
import pytest
from test_pretrained import REFERENCE, positions, same

import jaxformer as jf
from jaxformer.convert import safetensors
from jaxformer.convert.families import family_of
from jaxformer.convert.tensors import shapes

GOLDEN = Path(__file__).parent / "golden" / "encoders"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
HEADS = {
    "bert": "masked_lm",
    "bert_model": "pooler",
    "bert_classes": "classifier",
    "bert_tokens": "token_classifier",
    "roberta": "masked_lm",
    "roberta_classes": "classifier",
    "distilbert": "masked_lm",
    "albert": "masked_lm",
    "albert_classes": "classifier",
}
OF_TEXTS = ("pooler", "classifier")


@cache
def loaded(name, head=None):
    return jf.load(GOLDEN / name, dtype="float32", head=head)


@cache
def reference(name):
    found = dict(np.load(GOLDEN / name / "ref.npz"))
    return {key: x.astype(np.int32) if x.dtype == np.int16 else x for key, x in found.items()}


def copied(name, folder, **changes):
    shutil.copytree(GOLDEN / name, folder)
    said = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    return folder


def output(model, wanted, side=""):
    at = positions(wanted[f"{side}mask"]) if side else None
    types = wanted.get(f"{side}types")
    return draw.logits(model.model, model.params, wanted[f"{side}ids"], at, token_types=types)


def test_every_head_has_a_golden_model():
    assert {name: loaded(name).config.head for name in NAMES} == HEADS


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_residual_streams_are_those_of_the_reference(name):
    model, wanted = loaded(name), reference(name)
    found, read = draw.apply(
        model.model,
        {"params": model.params},
        wanted["ids"],
        token_types=wanted.get("types"),
        mutable=("intermediates",),
    )
    draw.close(found, wanted["logits"], REFERENCE)
    taps = read["intermediates"]
    layers = [taps["encoder"][f"layers_{i}"]["x"] for i in range(model.config.num_blocks)]
    layers = np.concatenate(layers) if model.config.num_distinct_layers else np.stack(layers)
    draw.close(np.concatenate([taps["x"][None], layers]), wanted["hidden"], REFERENCE)
    hidden = draw.logits(model.model, model.params, wanted["ids"], token_types=wanted.get("types"), method="hidden")
    draw.close(hidden, wanted["hidden"][-1], REFERENCE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padding_on_either_side_changes_nothing(name, side):
    model, wanted = loaded(name), reference(name)
    if f"{side}_ids" not in wanted:  # its positions cannot be told to the reference: padding right says what they are
        assert (name, side) == ("distilbert", "left")
        at = positions(wanted["right_mask"])
        found = draw.logits(model.model, model.params, np.flip(wanted["right_ids"], 1), np.flip(at, 1))
        draw.close(np.flip(found, 1)[0][at[0] >= 0], wanted["right_logits"], REFERENCE)
        return
    found, mask = output(model, wanted, f"{side}_"), wanted[f"{side}_mask"]
    if model.config.head in OF_TEXTS:
        # The reference reads the first column, which is padding on the left; we read the first token.
        draw.close(found[0], wanted["right_logits"], REFERENCE)
    else:
        draw.close(found[0][mask[0] == 1], wanted[f"{side}_logits"], REFERENCE)
    draw.close(found[1], wanted["logits"][0], REFERENCE)


@pytest.mark.parametrize(("name", "changes"), [
    ("bert", {"hidden_act": "gelu_new"}),
    ("bert", {"layer_norm_eps": 1e-3}),
    ("bert_model", {"hidden_act": "gelu_new"}),
    ("roberta", {"layer_norm_eps": 1e-3}),
    ("roberta_classes", {"hidden_act": "gelu_new"}),
    ("distilbert", {"activation": "gelu_new"}),
    ("albert", {"layer_norm_eps": 1e-3}),
])  # fmt: skip
def test_a_wrong_convention_moves_the_outputs(name, changes, tmp_path):
    wanted = reference(name)
    model = jf.load(copied(name, tmp_path / "model", **changes), dtype="float32")
    assert abs(output(model, wanted) - wanted["logits"]).max() > REFERENCE


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_comes_back_bit_by_bit_with_the_tensors_of_the_original(name, tmp_path):
    for dtype in (None, "float32"):
        model = jf.load(GOLDEN / name, dtype=dtype)
        jf.save(tmp_path / str(dtype), model.config, model.params, family=name.partition("_")[0])
        again = jf.load(tmp_path / str(dtype))
        assert again.config == model.config
        same(again.params, model.params)
    original, written = safetensors.load(GOLDEN / name), safetensors.load(tmp_path / "None")
    prefix = "bert." if name == "bert_model" else ""  # which files of the bare model leave out
    assert {prefix + key for key in original} == set(written)
    for key, tensor in original.items():
        is_padded = "position_embeddings" in key and model.config.num_token_types == 1
        tensor = np.concatenate([tensor[:2] * 0, tensor[2:]]) if is_padded else tensor
        np.testing.assert_array_equal(written[prefix + key].astype(tensor.dtype), tensor)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_comes_back_equal(name):
    source = json.loads((GOLDEN / name / "config.json").read_text())
    family, found = family_of(source), family_of(source).config(source)
    assert family.config(json.loads(json.dumps(family.source(found)))) == found
    assert family.differences(found) == []


# Heads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_can_be_opened_without_its_head(name):
    model, wanted = loaded(name, head="none"), reference(name)
    assert model.config.head == "none"
    draw.close(output(model, wanted), wanted["hidden"][-1], REFERENCE)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_a_head_comes_back_as_one(name, tmp_path):
    model = loaded(name, head="none")
    jf.save(tmp_path, model.config, model.params, family=name.partition("_")[0])
    again = jf.load(tmp_path)
    assert again.config == model.config
    same(again.params, model.params)


def test_a_copy_of_the_embeddings_must_be_one(tmp_path):
    folder = copied("bert", tmp_path / "model")
    tensors = {name: np.array(x) for name, x in safetensors.load(folder).items()}
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()
    safetensors.save(folder / "model.safetensors", tensors)
    same(jf.load(folder, dtype="float32").params, loaded("bert").params)
    tensors["cls.predictions.decoder.weight"][0, 0] += 1
    safetensors.save(folder / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"ties 'cls\.predictions\.decoder\.weight' to the embedding, but they differ"):
        jf.load(folder)


def test_a_pooler_that_the_file_holds_can_be_asked_for():
    classes = loaded("bert_classes")
    pooled = loaded("bert_classes", head="pooler")
    same(pooled.params["pooler"], classes.params["classifier"]["pooler"])


@pytest.mark.parametrize(("name", "head", "message"), [
    ("bert", "classifier", r"tensor 'bert\.pooler\.dense\.weight' of shape \(24, 24\) is missing"),
    ("bert_tokens", "pooler", r"tensor 'bert\.pooler\.dense\.weight'"),
    ("bert_model", "masked_lm", r"tensor 'cls\.predictions\.transform\.dense\.weight'"),
    ("bert", "lm", "head='lm' is none that models of bert have; choose of .*'masked_lm', 'pooler'"),
    ("distilbert", "classifier", "head='classifier' is none that models of distilbert have"),
])  # fmt: skip
def test_a_head_that_is_not_there_is_refused(name, head, message):
    with pytest.raises(ValueError, match=message):
        jf.load(GOLDEN / name, head=head)


def test_a_decoder_has_one_head():
    path = GOLDEN.parent / "gpt2"
    assert jf.load(path, head="lm").config == jf.load(path).config
    with pytest.raises(ValueError, match=r"head='none' is none that models of gpt2 have; choose of \['lm'\]"):
        jf.load(path, head="none")


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("bert", {"architectures": ["BertForNextSentencePrediction"]}, "names no class that is known; give the head"),
    ("bert", {"architectures": None}, "architectures=None names no class"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key', which is not"),
    ("bert", {"is_decoder": True}, "is_decoder=True, which is not supported"),
    ("roberta", {"pad_token_id": 0}, "pad_token_id=0, which is not supported; only 1"),
    ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings=False, which is not supported"),
    ("distilbert", {"tie_word_embeddings": False}, "tie_word_embeddings=False, which is not supported"),
    ("roberta", {"hidden_act": "relu"}, "hidden_act='relu': the head for masked tokens has gelu; load another head"),
    ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings=2 must be at least 3"),
    ("bert_classes", {"id2label": []}, r"id2label=\[\] must be an object"),
    ("bert_classes", {"id2label": {}}, "the number of names in id2label"),
    ("bert_classes", {"num_labels": 4}, "num_labels=4, but id2label names 3 classes; they must agree"),
    ("bert_classes", {"id2label": {"0": "a"}}, r"'classifier\.weight' has shape \(3, 24\), but the config makes it"),
    ("bert", {"type_vocab_size": 3}, r"token_type_embeddings\.weight' has shape \(2, 24\)"),
])  # fmt: skip
def test_what_cannot_be_right_is_refused(name, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        jf.load(copied(name, tmp_path / "model", **changes))


def test_a_model_without_prefix_and_with_buffers_is_read(tmp_path):
    """As sentence encoders are published: names without `bert.`, and a buffer of positions."""
    tensors = {name.removeprefix("bert."): x for name, x in safetensors.load(GOLDEN / "bert_model").items()}
    tensors["embeddings.position_ids"] = np.arange(32)[None]
    folder = copied("bert_model", tmp_path / "model")
    safetensors.save(folder / "model.safetensors", tensors)
    same(jf.load(folder, dtype="float32").params, loaded("bert_model").params)
    tensors["embeddings.more"] = np.ones(3, np.float32)
    safetensors.save(folder / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"no model of this config has the tensors 'embeddings\.more'"):
        jf.load(folder)


def test_the_old_and_the_new_way_to_count_classes(tmp_path):
    two = jf.load(GOLDEN / "bert_classes").config
    assert two.num_labels == 3
    source = json.loads((GOLDEN / "bert_classes" / "config.json").read_text())
    bare = {key: value for key, value in source.items() if key not in ("id2label", "label2id")}
    assert family_of(source).config(bare).num_labels == 2
    assert family_of(source).config(bare | {"num_labels": 5}).num_labels == 5


@pytest.mark.parametrize("name", NAMES)
def test_transformers_opens_what_was_saved_and_computes_the_same(name, tmp_path):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = loaded(name)
    jf.save(tmp_path, model.config, model.params)
    kind = getattr(transformers, json.loads((tmp_path / "config.json").read_text())["architectures"][0])
    theirs, report = kind.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert [names for names in report.values() if names] == []
    ids = np.asarray(draw.ids(2, 12, vocab_size=40)) + 4
    with torch.no_grad():
        found = theirs.eval()(input_ids=torch.from_numpy(ids.astype(np.int64)))
    expected = found.pooler_output if model.config.head == "pooler" else found.logits
    draw.close(draw.logits(model.model, model.params, jnp.asarray(ids)), expected.numpy(), REFERENCE)


def test_the_presets_have_the_sizes_of_the_published_models():
    rows_of_padding = 2 * 768
    counts = {
        "bert": 109_514_298,
        "roberta": 124_697_433 - rows_of_padding,
        "distilbert": 66_985_530,
        "albert": 11_221_680,
    }
    for name, count in counts.items():
        assert sum(np.prod(shape) for shape in shapes(jf.PRESETS[name]).values()) == count

"""What config.json and the tensors of a published model may say: both spellings, and one clear error for all else."""

import contextlib
import dataclasses
import json
from pathlib import Path

import draw
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.convert import safetensors
from jaxformer.convert.families import FAMILIES, family_for, family_of
from jaxformer.convert.family import HOW_RUN, RATES
from jaxformer.convert.keys import plain

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/ref.npz"))
GONE = object()
FIELDS = [field.name for field in dataclasses.fields(jf.Config)]


def said(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


def config(source):
    return family_of(source).config(source)


def changed(name, **changes):
    return {key: value for key, value in (said(name) | changes).items() if value is not GONE}


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


# The two spellings ----------------------------------------------------------------------------------------------------

THETA = {"rope_theta": 10000.0}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5, "original_max_position_embeddings": 16}
OLD = {
    "llama": THETA,
    "llama_tied": {"rope_theta": 500000, "rope_scaling": None},
    "llama3_rope": THETA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama_linear": THETA | {"rope_scaling": {"type": "linear", "factor": 4}},
    "llama_yarn": THETA | {"rope_scaling": {"type": "yarn", **YARN}},
    "mistral": THETA,
    "qwen2": {"rope_theta": 1000000.0, "layer_types": GONE, "sliding_window": 4096},
    "qwen3": THETA | {"layer_types": GONE},
    "gemma2": THETA | {"layer_types": GONE},
    "gemma3": {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "layer_types": GONE,
        "sliding_window_pattern": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "_sliding_window_pattern": GONE,
    },
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_neox_serial": {"rotary_pct": 1.0},
    "phi": THETA | {"partial_rotary_factor": 0.5},
    "bloom": {"hidden_size": GONE, "n_embed": 24, "n_head": GONE, "num_attention_heads": 6, "n_inner": None},
}


@pytest.mark.parametrize("name", OLD)
def test_the_old_spelling_says_the_same(name):
    assert config(changed(name, rope_parameters=GONE, **OLD[name])) == config(said(name))


def test_what_is_not_said_is_what_the_published_models_leave_out():
    assert config(changed("gpt_neox", rope_parameters=GONE)) == config(said("gpt_neox"))  # a quarter of the lanes
    assert config(changed("llama", num_key_value_heads=GONE)).sizes["K"] == 6
    assert config(changed("gpt2", n_inner=GONE, tie_word_embeddings=GONE)) == config(said("gpt2"))
    assert config(changed("mistral", sliding_window=None)).window is None


@pytest.mark.parametrize("name", NAMES)
def test_a_config_comes_back_equal(name):
    source = said(name)
    family, found = family_of(source), config(source)
    again = json.loads(json.dumps(family.source(found)))
    assert family.config(again) == found
    assert family.differences(found) == []


@given(st.sampled_from(NAMES), draw.configs(), st.sets(st.sampled_from(FIELDS), max_size=2))
def test_a_family_that_claims_a_config_brings_it_back_equal(name, other, taken):
    """Of configs that are a golden model's with some fields of another."""
    try:
        wanted = dataclasses.replace(config(said(name)), **{field: getattr(other, field) for field in taken})
    except ValueError:
        return  # fields that contradict each other
    try:
        family = family_for(wanted)
    except ValueError as error:
        family, reasons = None, str(error)
    if family is None:
        assert [name for name in FAMILIES if f"{name}: " not in reasons] == []
        return
    found = family.config(json.loads(json.dumps(family.source(wanted))))
    skipped = {*HOW_RUN, *(rate for rate in RATES if rate not in family.keys)}
    fields = {field.name for field in dataclasses.fields(jf.Config)} - skipped
    wanted = plain(wanted)
    assert {name: getattr(found, name) for name in fields} == {name: getattr(wanted, name) for name in fields}


@given(draw.configs())
def test_the_plain_form_is_the_same_model(wanted):
    found = plain(wanted)
    assert plain(found) == found
    names = ("sizes", "windows", "scale", *(["rotaries"] if wanted.positions == "rotary" and found == wanted else []))
    assert [getattr(found, name) for name in names] == [getattr(wanted, name) for name in names]


# Values that are refused ----------------------------------------------------------------------------------------------

WHOLE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("llama", {"model_type": GONE}, "model_type=None is not supported; known are gpt2, llama, mistral"),
    ("llama", {"model_type": "gpt_oss"}, "model_type='gpt_oss' is not supported"),
    ("llama", {"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported"),
    ("llama", {"hidden_size": GONE}, "lacks 'hidden_size'"),
    ("llama", {"hidden_size": "24"}, "hidden_size='24' must be an integer"),
    ("llama", {"hidden_size": None}, "hidden_size=None must be an integer"),
    ("llama", {"hidden_size": 24.0}, "hidden_size=24.0 must be an integer"),
    ("llama", {"hidden_size": True}, "hidden_size=True must be an integer"),
    ("llama", {"hidden_size": 0}, "hidden_size=0 must be an integer of at least 1"),
    ("llama", {"hidden_size": 10**30}, "hidden_size=10+ must be at most"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=10+ must be at most 10000"),
    ("llama", {"num_attention_heads": 5}, "num_heads=5 is not a multiple of num_kv_heads=2"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps=0 must be a positive finite number"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps=.* must be at most"),
    ("llama", {"hidden_act": "xielu"}, "hidden_act='xielu' is not an activation"),
    ("llama", {"hidden_act": ["silu"]}, "is not an activation"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
    ("llama", {"attention_dropout": 1.0}, "attention_dropout=1.0 must be a number from 0"),
    ("llama", {"attention_bias": True}, "attention_bias=True and mlp_bias=False"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}, which is not supported"),
    ("llama", {"rope_parameters": 3}, "rope_parameters=3 must be an object"),
    ("llama", {"rope_parameters": WHOLE | {"rope_type": "dynamic"}}, "rope_type='dynamic' are not supported"),
    ("llama", {"rope_parameters": WHOLE | {"rope_type": ["yarn"]}}, "are not supported; known are"),
    ("llama", {"rope_parameters": WHOLE | {"rope_type": "linear"}}, "lacks 'factor'"),
    ("llama", {"rope_parameters": WHOLE | {"rope_type": "linear", "factor": 0.5}}, "factor=0.5 would shorten"),
    ("llama", {"rope_parameters": WHOLE | {"mscale": 1.0}}, r"unknown keys \['mscale'\]"),
    ("llama", {"rope_parameters": WHOLE | {"partial_rotary_factor": 0.5}}, "turn as a whole"),
    ("llama", {"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta='1e6' must be a positive"),
    ("mistral", {"sliding_window": GONE}, "lacks 'sliding_window'"),
    ("mistral", {"sliding_window": -1}, "sliding_window=-1 must be an integer"),
    ("mistral", {"num_key_value_heads": GONE}, "lacks 'num_key_value_heads'"),
    ("qwen3", {"layer_types": ["full_attention"]}, "each of the 2 layers"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "names 'linear_attention'"),
    ("qwen3", {"layer_types": [[], {}]}, r"names \[\]"),
    ("qwen3", {"use_sliding_window": False}, "use_sliding_window is false"),
    ("qwen3", {"max_window_layers": "x", "layer_types": GONE}, "max_window_layers='x' must be"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True, which is not supported"),
    ("gemma2", {"sliding_window": None}, "sliding_window=None must be an integer"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True, which is not supported"),
    ("gemma3", {"rope_parameters": {"full_attention": [], "sliding_attention": 3}}, "must be an object"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True, which is not"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True, which is not supported"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias=False, which is not supported; only True is"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.01}}, "rotary.width=0 must be"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "is odd; make it even"),
    ("gptj", {"rotary_dim": None}, "rotary_dim=None must be an integer"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm=True, which is not supported"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False, which is not supported"),
    ("opt", {"word_embed_proj_dim": 16}, r"word_embed_proj_dim=16 differs from hidden_size=24.*OPT 350m"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual.*=True, which is not supported"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi=False, which is not supported"),
    ("mpt", {"attn_config": {"clip_qkv": 6}}, "clip_qkv=6, which is not supported; only None is"),
    ("mpt", {"attn_config": "torch"}, "attn_config='torch' must be an object"),
])  # fmt: skip
def test_a_config_that_cannot_be_had_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config(changed(name, **changes))


VALUES = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5)
JSON = st.recursive(VALUES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))


@settings(max_examples=300)
@given(st.data())
def test_no_value_does_anything_but_a_value_error(data):
    source = said(data.draw(st.sampled_from(NAMES)))
    key = data.draw(st.sampled_from(sorted(source)))
    source[key] = data.draw(JSON)
    with contextlib.suppress(ValueError):
        assert isinstance(config(source), jf.Config)


# Tensors that are refused ---------------------------------------------------------------------------------------------


def with_tensors(name, folder, change, **changes):
    """A copy of a golden model with other tensors: `change` maps names to arrays, GONE, or functions of the old one."""
    tensors = dict(safetensors.load(GOLDEN / name))
    for key, new in change.items():
        if new is GONE:
            del tensors[key]
        else:
            tensors[key] = np.asarray(new(tensors[key]) if callable(new) else new)
    folder.mkdir(exist_ok=True)
    safetensors.save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(changed(name, **changes)))
    return folder


def put(value):
    def change(tensor):
        tensor = tensor.copy()
        tensor.flat[3] = value
        return tensor

    return change


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(("name", "change", "message"), [
    ("llama", {Q: GONE}, r"tensor 'model\.layers\.0\.self_attn\.q_proj\.weight' of shape \(24, 24\) is missing"),
    ("llama", {"lm_head.weight": GONE}, r"tensor 'lm_head\.weight' of shape \(56, 24\) is missing"),
    ("llama", {Q: lambda x: x[:-4]}, r"q_proj\.weight' has shape \(20, 24\), but the config makes it \(24, 24\)"),
    ("llama", {Q: lambda x: x.reshape(-1)}, r"has shape \(576,\), but the config makes it \(24, 24\)"),
    ("llama", {Q: put(np.nan)}, r"q_proj\.weight' holds NaN or infinity"),
    ("llama", {Q: put(-np.inf)}, r"q_proj\.weight' holds NaN or infinity"),
    ("llama", {Q: lambda x: x.astype(np.int8)}, r"q_proj\.weight' has type int8; weights must be"),
    ("llama", {Q: lambda x: x.astype(ml_dtypes.float8_e4m3fn)}, r"has type float8_e4m3fn; weights must be"),
    ("llama", {"score.weight": np.zeros(3, np.float32)}, r"no model of this config has the tensors 'score\.weight'"),
    ("llama", {"model.layers.2.mlp.up_proj.weight": np.zeros(3)}, "has the tensors 'model.layers.2.mlp.up_proj"),
    ("llama", {"model.layers.0.self_attn.q_proj.bias": np.zeros(24)}, r"has the tensors .*q_proj\.bias'"),
    ("llama_tied", {"lm_head.weight": np.ones((56, 24), np.float32)}, r"ties 'lm_head\.weight' to the embedding"),
    ("llama_tied", {"lm_head.weight": np.ones((55, 24), np.float32)}, r"ties 'lm_head\.weight' to the embedding"),
    ("gpt2", {"transformer.h.0.attn.c_attn.weight": lambda x: x.T}, r"has shape \(72, 24\), .* makes it \(24, 72\)"),
    ("opt", {"model.decoder.embed_positions.weight": lambda x: x[2:]}, r"has shape \(32, 24\), .* makes it \(34, 24\)"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(name, change, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        jf.load(with_tensors(name, tmp_path / "model", change))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("changes", [
    {"num_hidden_layers": 9999}, {"intermediate_size": 2**31 - 1}, {"vocab_size": 2**31 - 1}, {"head_dim": 2**30},
])  # fmt: skip
def test_sizes_beyond_the_file_are_refused_before_anything_is_made(changes, tmp_path):
    with pytest.raises(ValueError, match="but the file holds"):
        jf.load(with_tensors("llama", tmp_path / "model", {}, **changes))


def test_buffers_and_prefixes_are_as_published_files_have_them(tmp_path):
    """The first GPT-2 files have no prefix and hold the causal mask."""
    wanted = jf.load(GOLDEN / "gpt2").params
    tensors = safetensors.load(GOLDEN / "gpt2")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for names in (tensors, bare):
        prefix = "" if names is bare else "transformer."
        masks = {f"{prefix}h.{i}.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.uint8)) for i in range(2)}
        masks |= {f"{prefix}h.0.attn.masked_bias": np.float32(-1e4)}
        folder = tmp_path / f"model {prefix}"
        with_tensors("gpt2", folder, {})
        safetensors.save(folder / "model.safetensors", dict(names) | masks)
        found = jf.load(folder).params
        assert jnp.array_equal(found["decoder"]["layers_1"]["attn"]["k_proj"]["kernel"],
                               wanted["decoder"]["layers_1"]["attn"]["k_proj"]["kernel"])  # fmt: skip
    safetensors.save(folder / "model.safetensors", dict(tensors) | {"transformer.h.2.attn.bia": np.ones(3, np.uint8)})
    with pytest.raises(ValueError, match=r"has the tensors 'transformer\.h\.2\.attn\.bia'"):
        jf.load(folder)


@pytest.mark.parametrize("name", ["bart", "mbart", "marian"])
def test_a_model_saved_without_its_head_has_the_tied_one(name, tmp_path):
    """As facebook/bart-base is published: names without `model.`, and no bias of the head."""
    wanted, tensors = jf.load(GOLDEN / name).params, dict(safetensors.load(GOLDEN / name))
    bias = tensors.pop("final_logits_bias")
    folder = with_tensors(name, tmp_path / "bare", {})
    safetensors.save(folder / "model.safetensors", {key.removeprefix("model."): x for key, x in tensors.items()})
    found = jf.load(folder)
    np.testing.assert_array_equal(found.params["lm_head"]["bias"], 0)
    assert found.params["lm_head"]["bias"].shape == (bias.size,)
    same(found.params | {"lm_head": wanted["lm_head"]}, wanted)
    jf.save(tmp_path / "again", found.config, found.params)
    same(jf.load(tmp_path / "again").params, found.params)
    safetensors.save(folder / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"'final_logits_bias' of shape .* is missing"):
        jf.load(folder)


def test_a_head_that_repeats_the_embedding_is_accepted_where_they_are_tied(tmp_path):
    embedding = safetensors.load(GOLDEN / "llama_tied")["model.embed_tokens.weight"]
    model = jf.load(with_tensors("llama_tied", tmp_path / "model", {"lm_head.weight": embedding}))
    assert "lm_head" not in model.params


def test_folders_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give a folder"):
        jf.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is a file; give a folder"):
        jf.load(GOLDEN / "llama" / "config.json")
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        jf.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said("llama")))
    with pytest.raises(FileNotFoundError, match="holds neither"):
        jf.load(tmp_path)
    for text in ("", "[]", "{", '{"model_type": "llama", "model_type": "gpt2"}', "[" * 10**5):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            jf.load(tmp_path)

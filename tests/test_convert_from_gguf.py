"""GGUF in Hugging Face's words: names, forms of tensors, configs, and what is refused."""

import re
import tracemalloc

import numpy as np
import oracle
import pytest
from gguf_files import whole
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.convert.from_gguf import as_folder
from jaxformer.convert.gguf import GGUFFile

# Tiny models: Hugging Face's tensors, and the file that holds them ----------------------------------------------------

D, N, K, H, F, V, L = 8, 4, 2, 6, 12, 10, 2
"""H is not D / N, so that one cannot stand for the other."""

OUTER = {"model.embed_tokens.weight": ("token_embd.weight", (V, D)), "model.norm.weight": ("output_norm.weight", (D,))}
INNER = {
    "input_layernorm.weight": ("attn_norm.weight", (D,)),
    "self_attn.q_proj.weight": ("attn_q.weight", (N * H, D)),
    "self_attn.k_proj.weight": ("attn_k.weight", (K * H, D)),
    "self_attn.v_proj.weight": ("attn_v.weight", (K * H, D)),
    "self_attn.o_proj.weight": ("attn_output.weight", (D, N * H)),
    "post_attention_layernorm.weight": ("ffn_norm.weight", (D,)),
    "mlp.gate_proj.weight": ("ffn_gate.weight", (F, D)),
    "mlp.up_proj.weight": ("ffn_up.weight", (F, D)),
    "mlp.down_proj.weight": ("ffn_down.weight", (D, F)),
}
QKV_BIAS = {f"self_attn.{x}_proj.bias": (f"attn_{x}.bias", (n * H,)) for x, n in {"q": N, "k": K, "v": K}.items()}
QK_NORM = {f"self_attn.{x}_norm.weight": (f"attn_{x}_norm.weight", (H,)) for x in "qk"}
SANDWICH = {
    "post_attention_layernorm.weight": ("post_attention_norm.weight", (D,)),
    "pre_feedforward_layernorm.weight": ("ffn_norm.weight", (D,)),
    "post_feedforward_layernorm.weight": ("post_ffw_norm.weight", (D,)),
}
GPT2_OUTER = {
    "transformer.wte.weight": ("token_embd.weight", (V, D)),
    "transformer.wpe.weight": ("position_embd.weight", (16, D)),
    "transformer.ln_f.weight": ("output_norm.weight", (D,)),
    "transformer.ln_f.bias": ("output_norm.bias", (D,)),
}
GPT2_INNER = {
    f"{theirs}.{part}": (f"{ours}.{part}", shape if part == "weight" else shape[-1:])
    for theirs, (ours, shape) in {
        "ln_1": ("attn_norm", (D,)),
        "attn.c_attn": ("attn_qkv", (D, 3 * D)),
        "attn.c_proj": ("attn_output", (D, D)),
        "ln_2": ("ffn_norm", (D,)),
        "mlp.c_fc": ("ffn_up", (D, F)),
        "mlp.c_proj": ("ffn_down", (F, D)),
    }.items()
    for part in ("weight", "bias")
}
TENSORS = {
    "llama": (OUTER, "model.layers.", INNER),
    "qwen2": (OUTER, "model.layers.", INNER | QKV_BIAS),
    "qwen3": (OUTER, "model.layers.", INNER | QK_NORM),
    "gemma2": (OUTER, "model.layers.", INNER | SANDWICH),
    "gemma3": (OUTER, "model.layers.", INNER | SANDWICH | QK_NORM),
    "gpt2": (GPT2_OUTER, "transformer.h.", GPT2_INNER),
}

SIZES = {
    "block_count": L,
    "context_length": 16,
    "embedding_length": D,
    "feed_forward_length": F,
    "attention.head_count": N,
}
ROTARY = SIZES | {
    "attention.head_count_kv": K,
    "attention.key_length": H,
    "attention.value_length": H,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
}
WINDOW = ROTARY | {"attention.sliding_window": 7}
FIELDS = {
    "llama": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
    "gemma2": WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": WINDOW,
    "gpt2": SIZES | {"attention.layer_norm_epsilon": 1e-5},
}


def metadata(architecture, **more):
    """A file's metadata; a key of the architecture is changed by its name with _ for the dots, or left out by None."""
    fields = {re.sub(r"\.", "__", key): value for key, value in FIELDS[architecture].items()} | more
    fields = {f"{architecture}.{key.replace('__', '.')}": value for key, value in fields.items() if value is not None}
    return {"general.architecture": architecture} | fields


def permuted(w, heads):
    """What a writer of `llama` files does: lanes i and i + H/2 of a head become neighbours."""
    order = [head * H + half * H // 2 + i for head in range(heads) for i in range(H // 2) for half in range(2)]
    return w[order]


def stored(architecture, name, w):
    """What a writer of GGUF files makes of Hugging Face's tensor."""
    if architecture == "llama" and ".q_proj" in name:
        return permuted(w, N)
    if architecture == "llama" and ".k_proj" in name:
        return permuted(w, K)
    if architecture in ("gemma2", "gemma3") and "norm" in name:
        return w + 1
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        return w.T
    return w


def model(architecture, *, head=False):
    """Hugging Face's tensors, and the same as a file holds them. Multiples of 1/1024: adding 1 loses nothing."""
    rng = np.random.default_rng(1)
    outer, prefix, inner = TENSORS[architecture]
    names = outer | {f"{prefix}{i}.{end}": (f"blk.{i}.{ours}", s) for i in range(L) for end, (ours, s) in inner.items()}
    if head:
        names["lm_head.weight"] = ("output.weight", (V, D))
    theirs = {name: np.float32(rng.integers(-2048, 2048, shape) / 1024) for name, (_, shape) in names.items()}
    return theirs, {names[name][0]: stored(architecture, name, w) for name, w in theirs.items()}


@pytest.fixture
def read(tmp_path):
    def read(metadata, tensors):
        path = tmp_path / "model.gguf"
        path.write_bytes(whole(metadata, tensors))
        return as_folder(GGUFFile(path))

    return read


# Tensors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "head"),
    [(name, head) for name in TENSORS for head in (False, True) if not (head and name == "gemma2")],
)
def test_tensors_have_the_names_and_the_form_of_hugging_face(read, architecture, head):
    wanted, tensors = model(architecture, head=head)
    config, found = read(metadata(architecture), tensors)
    assert config["tie_word_embeddings"] is not head
    assert set(found) == set(wanted)
    assert len(found) == len(wanted)
    for name, w in wanted.items():
        np.testing.assert_array_equal(found[name], w, strict=True, err_msg=name)
    assert "model.layers.2.input_layernorm.weight" not in found
    with pytest.raises(KeyError):
        found["token_embd.weight"]


@pytest.mark.parametrize(("name", "heads"), [("q_proj", N), ("k_proj", K)])
def test_turning_halves_afterwards_is_turning_neighbours_before(read, rng, name, heads):
    """The scores of a head do not depend on the order of its lanes, so compare the turned lanes in the file's order."""
    _, tensors = model("llama")
    _, found = read(metadata("llama"), tensors)
    x = rng.normal(size=(2, 5, D))
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, -1, 100]])
    before = tensors[f"blk.1.attn_{name[0]}.weight"]
    after = found[f"model.layers.1.self_attn.{name}.weight"]
    neighbours = oracle.rotary((x @ before.T).reshape(2, 5, heads, H), positions, interleaved=True)
    halves = oracle.rotary((x @ after.T).reshape(2, 5, heads, H), positions)
    in_order = np.stack([halves[..., : H // 2], halves[..., H // 2 :]], axis=-1).reshape(halves.shape)
    np.testing.assert_allclose(in_order, neighbours, atol=1e-12)
    assert abs(oracle.rotary((x @ before.T).reshape(2, 5, heads, H), positions) - neighbours).max() > 1


def test_tensors_are_read_one_at_a_time(tmp_path):
    big = {"token_embd.weight": np.zeros((2000, D), "f4")}
    tensors = model("llama")[1] | big
    path = tmp_path / "model.gguf"
    path.write_bytes(whole(metadata("llama"), tensors))
    file = GGUFFile(path)
    as_folder(file)  # imports
    tracemalloc.start()
    _, found = as_folder(file)
    made = tracemalloc.get_traced_memory()[0]
    for name in found:
        found[name]
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made < 60_000
    assert left < 60_000
    assert peak < 4 * 2000 * D * 4


# Configs --------------------------------------------------------------------------------------------------------------

COMMON = {
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "intermediate_size": F,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": V,
    "tie_word_embeddings": True,
}
QWEN = COMMON | {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}
GEMMA = COMMON | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 7, "query_pre_attn_scalar": H}
SLIDING, FULL = "sliding_attention", "full_attention"


def config_of(read, architecture, **more):
    return read(metadata(architecture, **more), model(architecture)[1])[0]


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [
        (
            "llama",
            COMMON
            | {"model_type": "llama", "hidden_act": "silu", "rope_scaling": None}
            | {"attention_bias": False, "mlp_bias": False},
        ),
        ("qwen2", QWEN | {"model_type": "qwen2"}),
        ("qwen3", QWEN | {"model_type": "qwen3"}),
        (
            "gemma2",
            GEMMA
            | {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            | {"layer_types": [SLIDING, FULL]},
        ),
        (
            "gemma3",
            GEMMA
            | {"model_type": "gemma3_text", "rope_local_base_freq": 1e4, "rope_scaling": None}
            | {"layer_types": [SLIDING, SLIDING]},
        ),
        (
            "gpt2",
            {"model_type": "gpt2", "n_embd": D, "n_layer": L, "n_head": N, "n_inner": F, "n_positions": 16}
            | {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "vocab_size": V}
            | {"tie_word_embeddings": True},
        ),
    ],
)
def test_configs(read, architecture, wanted):
    assert config_of(read, architecture) == wanted


def test_what_a_file_may_leave_out(read):
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "output": (D, D)}
    tensors = model("llama")[1]
    tensors |= {f"blk.{i}.attn_{x}.weight": np.zeros(shape, "f4") for i in range(L) for x, shape in shapes.items()}
    left_out = dict.fromkeys(("attention__head_count_kv", "attention__key_length", "attention__value_length"))
    config, found = read(metadata("llama", rope__freq_base=None, **left_out), tensors)
    assert config["num_key_value_heads"] == N
    assert config["head_dim"] == D // N
    assert config["rope_theta"] == 10000.0
    assert found["model.layers.0.self_attn.k_proj.weight"].shape == (D, D)


def test_numbers_are_the_decimals_that_were_meant(read):
    """float32 of 1e-5 is 9.99999974738e-06 as a double."""
    config = config_of(read, "llama", attention__layer_norm_rms_epsilon=float(np.float32(1e-5)), rope__freq_base=5e5)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 500000.0


def test_ids_of_marked_tokens(read):
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0}
    config, _ = read(metadata("llama") | ids, model("llama")[1])
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)


def test_windows_of_gemma(read):
    def layers(architecture, number):
        tensors = {name: w for name, w in model(architecture)[1].items() if not name.startswith("blk.")}
        block = {name: w for name, w in model(architecture)[1].items() if name.startswith("blk.0.")}
        tensors |= {name.replace(".0.", f".{i}."): w for i in range(number) for name, w in block.items()}
        return read(metadata(architecture, block_count=number), tensors)[0]

    assert layers("gemma3", 7)["layer_types"] == [SLIDING] * 5 + [FULL, SLIDING]
    assert layers("gemma2", 3)["layer_types"] == [SLIDING, FULL, SLIDING]
    # The 27B models scale the scores by D / N and not by the width of a head.
    assert layers("gemma3", 62)["query_pre_attn_scalar"] == layers("gemma2", 46)["query_pre_attn_scalar"] == D // N
    assert layers("gemma3", 46)["query_pre_attn_scalar"] == H


def test_what_later_files_of_gemma_3_say_themselves(read):
    more = {"rope__freq_base_swa": 5e3, "attention__sliding_window_pattern": 2, "final_logit_softcapping": 30.0}
    config = config_of(read, "gemma3", **more)
    assert config["rope_local_base_freq"] == 5e3
    assert config["final_logit_softcapping"] == 30.0
    assert config["layer_types"] == [SLIDING, FULL]


def test_scalings_of_rotary_positions(read):
    linear = config_of(read, "gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    more = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 8}
    yarn = config_of(read, "qwen3", **more)
    assert yarn["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    assert config_of(read, "llama", rope__scaling__type="none")["rope_scaling"] is None


# LLaMA 3: the scaling as a tensor -------------------------------------------------------------------------------------


def factors(theta, width, factor):
    """By the oracle: the frequencies without scaling over those with it."""
    settings = {"base": theta, "width": None, "scaling": "by_parts", "factor": factor, "original_len": 8192}
    settings |= {"slow": 1.0, "fast": 4.0, "magnitude": None}
    plain, _ = oracle.rotary_frequencies(settings | {"scaling": "none"}, width)
    scaled, _ = oracle.rotary_frequencies(settings, width)
    return np.float32(plain / scaled)


def wide(width):
    """A model of one head of this width."""
    tensors = model("llama")[1]
    for i in range(L):
        for x in "qkv":
            tensors[f"blk.{i}.attn_{x}.weight"] = np.zeros((width, D), "f4")
        tensors[f"blk.{i}.attn_output.weight"] = np.zeros((D, width), "f4")
    more = {"attention__head_count": 1, "attention__head_count_kv": 1, "rope__freq_base": 500000.0}
    return metadata("llama", attention__key_length=width, attention__value_length=width, **more), tensors


@pytest.mark.parametrize(("width", "factor"), [(128, 8.0), (64, 32.0)])
def test_factors_of_llama_3_become_its_scaling(read, width, factor):
    fields, tensors = wide(width)
    stored = factors(500000.0, width, factor)
    assert 1 < len(set(stored.tolist())) < width // 2  # some kept, some between, some divided
    config, found = read(fields, tensors | {"rope_freqs.weight": stored})
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in found)


def test_factors_of_one_scale_nothing(read):
    config, _ = read(metadata("llama"), model("llama")[1] | {"rope_freqs.weight": np.ones(H // 2)})
    assert config["rope_scaling"] is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * np.float32(1.001),
        lambda x: x[:-1],
        lambda x: x[::-1],
        lambda x: np.append(x[:-1], np.float32(np.nan)),
        lambda x: np.append(x[:-1], np.float32(np.inf)),
        lambda x: -x,
        lambda x: np.zeros_like(x),
    ],
)
def test_other_factors_are_refused(read, change):
    fields, tensors = wide(64)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight are not the factors of LLaMA 3\.1"):
        read(fields, tensors | {"rope_freqs.weight": change(factors(500000.0, 64, 32.0))})


def test_two_scalings_at_once_are_refused(read):
    fields, tensors = wide(64)
    fields |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(ValueError, match=r"by rope\.scaling and by rope_freqs\.weight"):
        read(fields, tensors | {"rope_freqs.weight": np.ones(32)})


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "llama4", 3, ["llama"], None])
def test_architectures_that_are_not_known(read, name):
    fields = {} if name is None else {"general.architecture": name}
    known = "known are gemma2, gemma3, gpt2, llama, qwen2, qwen3"
    with pytest.raises(ValueError, match=rf"general.architecture is {re.escape(repr(name))}; {known}"):
        read(fields, {})


@pytest.mark.parametrize("architecture", FIELDS)
def test_a_missing_or_wrong_key_is_named(read, architecture):
    """Whatever stands there, the error names it; a key may be missing only where there is one meaning of that."""
    optional = {"attention.head_count_kv", "attention.key_length", "attention.value_length"}
    if architecture in ("llama", "gemma2"):
        optional = optional | {"rope.freq_base"}
    tensors = model(architecture)[1]
    for key in FIELDS[architecture]:
        wrong = ["8", 0, -1, 0.0, True, float("nan"), ["a"], np.int32([1, 2])] + [None] * (key not in optional)
        for value in wrong:
            with pytest.raises(ValueError, match=rf"model.gguf.*{architecture}\.{re.escape(key)}"):
                read(metadata(architecture, **{key.replace(".", "__"): value}), tensors)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"expert_count": 8}, "holds llama.expert_count, which nothing here understands"),
        ({"attention__scale": 1.0}, "holds llama.attention.scale, which"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count is 4, but can only be 6 here"),
        ({"attention__value_length": 4}, "llama.attention.value_length is 4, but can only be 6"),
        ({"vocab_size": 11}, "llama.vocab_size is 11, but can only be 10"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope'; known are none, linear, yarn"),
        ({"rope__scaling__type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"block_count": 2**32 - 1}, "llama.block_count is 4294967295, but there are only 20 tensors"),
        ({"block_count": 3}, "lacks 9 tensors: blk.2.attn_norm.weight, blk.2.attn_q.weight, "),
        ({"block_count": 1}, "has 9 tensors more than known: blk.1.attn_k.weight, blk.1.attn_norm.weight, "),
        ({"embedding_length": 9, "attention__key_length": None}, "llama.attention.key_length is missing, and"),
    ],
)
def test_metadata_that_cannot_be_meant(read, more, message):
    with pytest.raises(ValueError, match=f"model.gguf.*{message}"):
        config_of(read, "llama", **more)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "padding_token_id"])
@pytest.mark.parametrize("wrong", [-1, 1.0, "a", True])
def test_ids_that_are_no_ids(read, name, wrong):
    with pytest.raises(ValueError, match=rf"tokenizer.ggml.{name} is {wrong!r} and not the id"):
        read(metadata("llama") | {f"tokenizer.ggml.{name}": wrong}, model("llama")[1])


@pytest.mark.parametrize("architecture", TENSORS)
def test_tensors_that_are_missing_or_unknown_are_named(read, architecture):
    _, tensors = model(architecture)
    for name in tensors:
        less = {other: w for other, w in tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"model.gguf (lacks 1 tensors: |has no table ){re.escape(name)}"):
            read(metadata(architecture), less)
    unknown = ["blk.0.attn_rot_embd.weight", "blk.0.attn_output.bias", "blk.2.attn_q.weight", "blk.00.attn_q.weight"]
    unknown += ["output.weight"] * (architecture == "gemma2")
    unknown += ["output_norm.weight2", "blk.0.ffn_gate_inp.weight"] + ["rope_freqs.weight"] * (architecture != "llama")
    for name in unknown:
        if name in tensors:
            continue
        with pytest.raises(ValueError, match=f"has 1 tensors more than known: {re.escape(name)}"):
            read(metadata(architecture), tensors | {name: np.ones(3)})


@pytest.mark.parametrize("shape", [(N * H - 1, D), (N * H,), (D, N * H), (1, N * H, D)])
def test_queries_that_are_no_heads(read, shape):
    _, tensors = model("llama")
    _, found = read(metadata("llama"), tensors | {"blk.0.attn_q.weight": np.zeros(shape)})
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight has shape .*; 4 heads .* make 4 \* 6 rows"):
        found["model.layers.0.self_attn.q_proj.weight"]


# Mutations ------------------------------------------------------------------------------------------------------------

SMALL = {name: metadata(name) | {"tokenizer.ggml.bos_token_id": 1} for name in FIELDS}
FILES = {name: model(name)[1] for name in FIELDS}
KEYS = sorted({key for fields in SMALL.values() for key in fields} | {"llama.rope.scaling.type", "llama.vocab_size"})
VALUES = (
    st.none()
    | st.booleans()
    | st.sampled_from(["llama", "qwen2", "gemma3", "yarn", "", 2**32 - 1, 2**62, -(2**63), np.zeros(0, "i4")])
    | st.integers(0, 20)
    | st.floats(width=32)
    | st.lists(st.text(max_size=2), max_size=2)
)


@given(st.sampled_from(sorted(FIELDS)), st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
@settings(max_examples=300)
def test_whatever_the_metadata_say_there_is_an_error_or_a_config(tmp_path_factory, architecture, changes):
    changes = {key: value for key, value in changes.items() if value is not None}
    removed = [key for key in changes if isinstance(changes[key], list)]
    fields = SMALL[architecture] | changes
    for key in removed[:1]:
        del fields[key]
    path = tmp_path_factory.getbasetemp() / "metadata.gguf"
    path.write_bytes(whole(fields, FILES[architecture]))
    file = GGUFFile(path)
    tracemalloc.start()
    try:
        config, tensors = as_folder(file)
        shapes = {name: tensors[name].shape for name in tensors}
    except ValueError:
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2e6
    assert config["vocab_size"] == V
    assert len(shapes) == len(FILES[architecture])

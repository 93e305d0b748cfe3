"""What the headers of a model's files say, and that nothing but the headers is read."""

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import gguf_files
import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer import cli
from jaxformer.convert import safetensors
from jaxformer.tokenizers import Tokenizer
from jaxformer.trees import path_name

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.rglob("config.json"))
Q = "model.layers.0.self_attn.q_proj.weight"


def copied(name, folder, **changes):
    shutil.copytree(GOLDEN / name, folder)
    said = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def changed(folder, **tensors):
    """Writes the folder's tensors with others in their places; None takes one away."""
    found = dict(safetensors.load(folder)) | tensors
    found = {name: np.array(tensor) for name, tensor in found.items() if tensor is not None}
    safetensors.save(folder / "model.safetensors", found)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_is_what_is_loaded(name):
    found, model = jf.inspect(GOLDEN / name), jf.load(GOLDEN / name)
    assert found.family == json.loads((GOLDEN / name / "config.json").read_text())["model_type"]
    assert found.config == dataclasses.replace(model.config, param_dtype="float32")
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    wanted = {path_name(path): (leaf.shape, leaf.size) for path, leaf in leaves}
    assert {one.path: (one.shape, one.count) for one in found.parameters} == wanted
    assert found.count == sum(leaf.size for _, leaf in leaves)
    assert found.bytes_on_disk == sum(tensor.nbytes for tensor in safetensors.load(GOLDEN / name).values())
    assert (found.bytes_in_memory("float32"), found.bytes_in_memory("bfloat16")) == (4 * found.count, 2 * found.count)
    assert (found.problems, found.missing, found.unexpected, found.misshapen) == ((), {}, (), {})
    assert jf.Config(**found.changes) == found.config


def test_a_file_larger_than_any_memory_is_inspected_without_reading_it(tmp_path):
    """The data are a hole of half a terabyte, which neither time nor memory would suffice to read."""
    rows = 2**38
    said = json.loads((GOLDEN / "llama" / "config.json").read_text()) | {"vocab_size": 2**31 - 1}
    (tmp_path / "config.json").write_text(json.dumps(said))
    header, end = {}, 0
    for name, shape in {"model.embed_tokens.weight": [2**31 - 1, 24], "mask": [rows]}.items():
        size = math.prod(shape) * (1 if name == "mask" else 4)
        kind = "BOOL" if name == "mask" else "F32"
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    found = jf.inspect(tmp_path)
    assert found.bytes_on_disk == end
    assert found.unexpected == ("mask",)
    assert "lm_head.weight" in found.missing
    assert found.parameters[-1].path == "lm_head/kernel"


def test_everything_that_does_not_fit_is_told_at_once(tmp_path):
    folder = copied("llama", tmp_path / "model")
    tensors = safetensors.load(folder)
    more = {"score.weight": np.zeros(3, np.float32), "model.rotary_emb.inv_freq": np.ones(2, np.float32)}
    short = {Q: tensors[Q][:-4], "model.norm.weight": tensors["model.norm.weight"].astype(np.int8)}
    changed(folder, **more, **short, **{"lm_head.weight": None})
    found = jf.inspect(folder)
    assert found.missing == {"lm_head.weight": (56, 24)}
    assert found.misshapen == {Q: ((20, 24), (24, 24))}
    assert found.unexpected == ("score.weight",)
    assert found.ignored == ("model.rotary_emb.inv_freq",)
    assert len(found.problems) == 4
    assert any("int8" in problem for problem in found.problems)
    with pytest.raises(ValueError, match="tensor"):
        jf.load(folder)


def test_every_key_that_cannot_be_had_is_told_of(tmp_path):
    wrong = {"hidden_size": "24", "rms_norm_eps": 0, "quantization_config": {"bits": 4}}
    found = jf.inspect(copied("llama", tmp_path / "model", **wrong))
    assert found.config is None
    assert len(found.problems) == 3
    for name in wrong:
        assert any(name in problem for problem in found.problems)
    found = jf.inspect(copied("llama", tmp_path / "other", model_type="mamba"))
    assert (found.family, found.config, found.parameters) == (None, None, ())
    assert found.tensors[Q].shape == (24, 24)
    assert "model_type='mamba' is not supported" in found.problems[0]


def test_sizes_beyond_the_file_are_told_of_and_nothing_is_made_of_them(tmp_path):
    found = jf.inspect(copied("llama", tmp_path / "model", num_hidden_layers=9999))
    assert found.parameters == ()
    assert "9999 layers, but the file holds" in found.problems[0]


def test_damaged_files_are_errors(tmp_path):
    folder = copied("llama", tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor .* is cut short"):
        jf.inspect(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        jf.inspect(folder)
    with pytest.raises(FileNotFoundError, match="does not exist; give a folder"):
        jf.inspect(tmp_path / "nowhere")


def test_the_tokenizer_is_named(tmp_path):
    model = jf.load(GOLDEN / "gpt2")
    tokenizer = Tokenizer.train(["a few words, a few words"], 260)
    jf.save(tmp_path, model.config, model.params, tokenizer=tokenizer)
    assert jf.inspect(tmp_path).tokenizer == ("BPE", tokenizer.vocab_size)
    assert jf.inspect(GOLDEN / "gpt2").tokenizer is None


def gguf(folder, **tensors):
    """A file of one layer whose words are its numbers."""
    D, F, V = 4, 6, 5
    names = {f"attn_{x}": (D, D) for x in ("q", "k", "v", "output")} | {"attn_norm": (D,), "ffn_norm": (D,)}
    names |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    shapes = {f"blk.0.{name}.weight": shape for name, shape in names.items()}
    shapes |= {"token_embd.weight": (V, D), "output_norm.weight": (D,)} | tensors
    fields = {"block_count": 1, "context_length": 8, "embedding_length": D, "feed_forward_length": F}
    fields |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {"general.architecture": "llama"} | {f"llama.{name}": value for name, value in fields.items()}
    words = {"model": "llama", "tokens": list("abcde"), "scores": np.zeros(5, "<f4"), "token_type": np.ones(5, "<i4")}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in words.items()}
    path = folder / "model.gguf"
    path.write_bytes(gguf_files.whole(metadata, {name: np.ones(x, np.float32) for name, x in shapes.items() if x}))
    return path


def test_a_gguf_file_is_told_of_in_the_same_words(tmp_path):
    pytest.importorskip("gguf")
    found = jf.inspect(gguf(tmp_path))
    assert (found.family, found.config.d_model, found.config.tie_embeddings) == ("llama", 4, True)
    assert found.count == found.bytes_on_disk // 4 == 5 * 4 + 3 * 4 + 4 * 16 + 3 * 24
    assert [problem for problem in found.problems if "tensor" in problem] == []
    assert {one.dtype for one in found.parameters} == {"F32"}
    found = jf.inspect(gguf(tmp_path, **{"blk.0.attn_q.weight": None, "more.weight": (3,), "output_norm.weight": (3,)}))
    assert found.missing == {Q: (4, 4)}
    assert found.unexpected == ("more.weight",)
    assert found.misshapen == {"model.norm.weight": ((3,), (4,))}


def test_the_command_prints_it(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxformer", "inspect", *map(str, arguments)])
        cli.main()
        return capsys.readouterr().out

    text = run(GOLDEN / "llama")
    assert "11,640 parameters; bytes: 23,280 on disk, 46,560 as float32, 23,280 as bfloat16" in text
    assert "final_norm/scale" in text
    said = json.loads(run(GOLDEN / "llama", "--json"))
    assert (said["family"], said["count"], said["problems"]) == ("llama", 11640, [])
    folder = copied("llama", tmp_path / "model")
    changed(folder, **{"lm_head.weight": None})
    with pytest.raises(SystemExit) as stopped:
        run(folder)
    assert stopped.value.code == 1
    assert "problem: tensor 'lm_head.weight' of shape (56, 24) is missing" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*does not exist"):
        run(tmp_path / "nowhere")

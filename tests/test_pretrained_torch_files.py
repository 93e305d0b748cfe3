"""pytorch_model.bin in a model's folder: read only where it is asked for, and then as the safetensors file would be."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_convert_torch_file import file, tensor
from test_pretrained import same

import jaxformer as jf
from jaxformer.convert import safetensors

GOLDEN = Path(__file__).parent / "golden"


def folder_of(name, path, *, shards=1):
    """A golden model whose tensors stand in PyTorch files."""
    path.mkdir()
    shutil.copy(GOLDEN / name / "config.json", path)
    tensors = {key: tensor(np.asarray(x)) for key, x in safetensors.load(GOLDEN / name).items()}
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    if shards == 1:
        (path / "pytorch_model.bin").write_bytes(file(parts[0], stream=False))
        return path
    weight_map = {}
    for number, part in enumerate(parts):
        shard = f"pytorch_model-{number:05}.bin"
        (path / shard).write_bytes(file(part, stream=False))
        weight_map |= dict.fromkeys(part, shard)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["llama", "encoders/bert"])
def test_it_is_read_where_it_is_asked_for(name, shards, tmp_path):
    folder = folder_of(name, tmp_path / "model", shards=shards)
    with pytest.raises(
        ValueError, match=r"only pytorch_model\.bin, which is a program; load\(\.\.\., torch_files=True\)"
    ):
        jf.load(folder)
    same(jf.load(folder, torch_files=True).params, jf.load(GOLDEN / name).params)
    assert jf.inspect(folder).problems == ()


def test_safetensors_are_taken_where_both_are(tmp_path):
    folder = folder_of("llama", tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"no such file")
    shutil.copy(GOLDEN / "llama" / "model.safetensors", folder)
    for asked in (False, True):
        same(jf.load(folder, torch_files=asked).params, jf.load(GOLDEN / "llama").params)


def test_neither_is_an_error_that_names_the_better_one(tmp_path):
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors"):
        jf.load(tmp_path, torch_files=True)


def test_a_file_that_does_more_than_hold_tensors_is_refused(tmp_path):
    folder = folder_of("llama", tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        jf.load(folder, torch_files=True)

"""Safetensors: what is saved comes back bit by bit, and a file that is not as the format says is refused by name."""

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.convert import safetensors as files
from jaxformer.convert.safetensors import DTYPES, load, load_metadata, save


def raw(header, data=b""):
    """A file's bytes from a header (a JSON value, or its text) and the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def data_section(path):
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.tobytes()


def example(rng):
    """A tensor of each type, from random bits, with a scalar and two empty ones."""
    tensors = {}
    for name, dtype in DTYPES.items():
        bits = rng.integers(0, 2 if name == "BOOL" else 256, size=24 * dtype.itemsize, dtype=np.uint8)
        tensors[f"layers.0.{name}"] = bits.view(dtype).reshape(2, 3, 4)
    tensors["scalar"] = np.array(-2.5, ml_dtypes.bfloat16)
    tensors["empty"] = np.zeros((0,), np.float32)
    tensors["no rows"] = np.zeros((0, 3), np.int64)
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


# Round trips ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_comes_back_bit_by_bit_and_in_order(tmp_path, rng):
    tensors = example(rng)
    path = tmp_path / "new" / "model.safetensors"
    save(path, tensors, {"format": "pt", "é": "\n"})
    same(load(path), tensors)
    same(load(path.parent), tensors)
    assert load_metadata(path) == {"format": "pt", "é": "\n"}
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_tensors_are_views_of_the_file_that_cannot_be_written(tmp_path):
    save(tmp_path / "model.safetensors", {"x": np.zeros(10**6, np.float32)})
    tracemalloc.start()
    x = load(tmp_path)["x"]
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1


def test_a_file_can_be_replaced_while_its_tensors_are_in_use(tmp_path, rng):
    path = tmp_path / "model.safetensors"
    save(path, example(rng))
    opened = load(path)
    save(path, opened)
    save(path, {"other": np.ones(3)})
    same(opened, example(np.random.default_rng(0)))


def test_layouts_in_memory_and_byte_orders_do_not_show_in_the_file(tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    save(tmp_path / "a", {"x": x.T, "y": x[:, ::2], "scalar": x[1, 1]})
    save(tmp_path / "b", {"x": x.T.astype(">f4"), "y": x[:, ::2].copy(), "scalar": np.array(4, ">f4")})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    same(load(tmp_path / "b"), {"x": x.T, "y": x[:, ::2], "scalar": np.array(4, np.float32)})


def test_a_file_that_was_read_is_saved_with_the_same_data(tmp_path):
    """Whatever the order of its tensors, and BF16 by its bits: the upper half of float32."""
    values = np.array([1.0, -2.5, 3.140625], np.float32)
    half = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    header = {"b": entry("F32", [3], 8, 20), "a": entry("BF16", [3], 0, 6), "c": entry("I8", [2], 6, 8)}
    path = tmp_path / "theirs"
    path.write_bytes(raw(header, half + b"\x01\xff" + values.tobytes()))
    found = load(path)
    assert list(found) == ["a", "c", "b"]
    assert found["a"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found["a"].astype(np.float32), values)
    np.testing.assert_array_equal(found["b"], values)
    save(tmp_path / "ours", found)
    assert data_section(tmp_path / "ours") == data_section(path)


def test_elements_that_would_cross_their_alignment_are_moved_behind_larger_ones(tmp_path, rng):
    tensors = {"a": np.int8([1]), "b": np.float64([2.0]), "c": np.float16([3, 4]), "d": np.float64([5.0])}
    save(tmp_path / "x", tensors)
    same(load(tmp_path / "x"), {name: tensors[name] for name in "bdca"})
    assert all(tensor.flags.aligned for tensor in load(tmp_path / "x").values())
    path = tmp_path / "theirs"
    path.write_bytes(raw({"a": entry("U8", [1], 0, 1), "b": entry("F32", [1], 1, 5)}, b"\x07\0\0\x80\x3f"))
    same(load(path), {"a": np.uint8([7]), "b": np.float32([1])})


def test_shards_are_as_large_as_allowed_and_have_an_index(tmp_path, rng):
    sizes = {"a": 5, "b": 5, "c": 30, "d": 1, "e": 9}
    tensors = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    save(tmp_path / "model.safetensors", tensors, {"format": "pt"}, max_shard_bytes=40)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 200},
        "weight_map": {"a": names[0], "b": names[0], "c": names[1], "d": names[2], "e": names[2]},
    }
    same(load(tmp_path), tensors)
    assert [list(load(tmp_path / name)) for name in names] == [["a", "b"], ["c"], ["d", "e"]]
    assert load_metadata(tmp_path / names[1]) == {"format": "pt"}
    other = tmp_path / "other"
    save(other / "model.safetensors", tensors, max_shard_bytes=200)
    assert [file.name for file in other.iterdir()] == ["model.safetensors"]


def test_the_reference_library_reads_ours_and_we_read_its_files(tmp_path, rng):
    tensors = {name: tensor for name, tensor in example(rng).items() if "F8" not in name}
    save(tmp_path / "ours", tensors, {"a": "b"})
    theirs = safetensors.numpy.load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (theirs[name].dtype, theirs[name].tobytes()) == (tensor.dtype, tensor.tobytes())
    with safetensors.safe_open(tmp_path / "ours", "np") as opened:
        assert opened.metadata() == {"a": "b"}
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", {"a": "b"})
    found = load(tmp_path / "theirs")
    same({name: found[name] for name in tensors}, tensors)
    assert load_metadata(tmp_path / "theirs") == {"a": "b"}
    save(tmp_path / "again", found, {"a": "b"})
    assert data_section(tmp_path / "again") == data_section(tmp_path / "theirs")


TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 255)),
    max_size=5,
)


@given(TENSORS, st.none() | st.integers(1, 100))
@settings(max_examples=50)
def test_any_tensors_come_back(tmp_path_factory, drawn, limit):
    tensors = {}
    for name, (dtype, shape, byte) in drawn.items():
        bits = np.full(int(np.prod(shape)) * DTYPES[dtype].itemsize, byte % 2 if dtype == "BOOL" else byte, np.uint8)
        tensors[name] = bits.view(DTYPES[dtype]).reshape(shape)
    folder = tmp_path_factory.mktemp("any")
    save(folder / "model.safetensors", tensors, max_shard_bytes=limit)
    found = load(folder)
    same({name: found[name] for name in tensors}, tensors)
    assert len(found) == len(tensors)


# What cannot be saved -------------------------------------------------------------------------------------------------


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    path, x = tmp_path / "model.safetensors", np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="tensor 'x' has dtype complex64; known are float64, float32"):
        save(path, {"x": x.astype(np.complex64)})
    with pytest.raises(ValueError, match="tensor 'x' has dtype object"):
        save(path, {"x": np.array([None])})
    with pytest.raises(ValueError, match="cannot be named __metadata__"):
        save(path, {"__metadata__": x})
    with pytest.raises(ValueError, match="max_shard_bytes=0 is less than 1; leave it out"):
        save(path, {"x": x}, max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_metadata_must_be_strings(tmp_path, unchecked):
    with pytest.raises(ValueError, match="metadata must hold strings by strings"):
        save(tmp_path / "x", {}, {"step": 1})


def test_a_model_is_not_saved_in_two_forms_at_once(tmp_path):
    path, tensors = tmp_path / "model.safetensors", {"a": np.zeros(9), "b": np.zeros(9)}
    save(path, tensors)
    with pytest.raises(ValueError, match=r"model.safetensors is there already and would contradict the new files"):
        save(path, tensors, max_shard_bytes=80)
    path.unlink()
    save(path, tensors, max_shard_bytes=80)
    with pytest.raises(ValueError, match=r"index.json is there already .*; remove it first"):
        save(path, tensors)
    path.write_bytes(raw({}))
    with pytest.raises(ValueError, match=r"holds both model.safetensors and model.safetensors.index.json; remove"):
        load(tmp_path)


def test_a_save_that_fails_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save(path, {"x": np.zeros(2)})
    before = path.read_bytes()

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(np, "ascontiguousarray", full)
    with pytest.raises(OSError, match="disk full"):
        save(path, {"x": np.ones(3)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# What is refused in a file --------------------------------------------------------------------------------------------

F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FOUR = b"\0\0\x80\x3f"


def bad(message, header, data=FOUR):
    return pytest.param(header if isinstance(header, bytes) else raw(header, data), message, id=message[:50])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        bad("is empty; download it again", b""),
        bad("a header of 513 bytes does not fit in 2", b"\1\2"),
        bad("is the pointer that Git LFS keeps", b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n"),
        bad("a header of 100000001 bytes is over the limit of 100000000", struct.pack("<Q", 10**8 + 1)),
        bad(f"a header of {2**64 - 1} bytes is over the limit", b"\xff" * 8),
        bad("a header of 3 bytes does not fit in 10; the file is cut short", struct.pack("<Q", 3) + b"{}"),
        bad("the header is not valid JSON: Expecting value", raw(b"")),
        bad("the header is not valid JSON: Extra data", raw(b"{}{}")),
        bad("the header is not valid JSON: 'utf-8' codec", raw(b'{"\xff": 1}')),
        bad("the header is not valid JSON: maximum recursion", raw(b"[" * 10**5)),
        bad("the header is not valid JSON: Exceeds the limit", raw(b'{"x": ' + b"9" * 5000 + b"}")),
        bad("the header is a JSON list and not an object", []),
        bad("the header is not valid JSON: 'x' stands twice", raw(b'{"x": 1, "y": 2, "x": 1}')),
        bad("the header is not valid JSON: 'dtype' stands twice", raw(b'{"x": {"dtype": "F32", "dtype": "F32"}}')),
        bad("__metadata__ must hold strings by strings", {"__metadata__": {"a": 1}}, b""),
        bad("__metadata__ must hold strings by strings", {"__metadata__": ["a"]}, b""),
        bad("tensor 'x' must be described by dtype, shape, data_offsets", {"x": 3}),
        bad("tensor 'x' must be described by", {"x": {"dtype": "F32", "shape": [1]}}),
        bad("tensor 'x' must be described by .* and nothing else", {"x": F32 | {"more": 1}}),
        bad("tensor 'x' has dtype 'F31'; known are F64, F32", {"x": F32 | {"dtype": "F31"}}),
        bad(r"tensor 'x' has dtype \['F32'\]", {"x": F32 | {"dtype": ["F32"]}}),
        bad("tensor 'x' has a shape that is not a list", {"x": F32 | {"shape": 1}}),
        bad("tensor 'x' has a shape that is not a list", {"x": F32 | {"shape": [1.0]}}),
        bad("tensor 'x' has a shape that is not a list", {"x": F32 | {"shape": [True]}}),
        bad("tensor 'x' has a shape that is not a list of .* sizes >= 0", {"x": F32 | {"shape": [-1, -1]}}),
        bad("tensor 'x' has a shape that is not a list of at most 64", {"x": F32 | {"shape": [1] * 65}}),
        bad("tensor 'x' has a shape that is not a list of at most 64", {"x": F32 | {"shape": [2**63]}}),
        bad("tensor 'x' has shape .*, which no array can have", {"x": F32 | {"shape": [2**33, 2**31]}}),
        bad("tensor 'x' has shape .*, which no array can have", {"x": F32 | {"shape": [2**62, 0]}}),
        bad("tensor 'x' has data_offsets that are not two", {"x": F32 | {"data_offsets": [0]}}),
        bad("tensor 'x' has data_offsets that are not two", {"x": F32 | {"data_offsets": [0, "4"]}}),
        bad("tensor 'x' has data_offsets that are not two numbers >= 0", {"x": F32 | {"data_offsets": [-4, 0]}}),
        bad(r"data_offsets \[4, 0\], but F32 \[1\] takes 4 bytes", {"x": F32 | {"data_offsets": [4, 0]}}),
        bad(r"data_offsets \[0, 4\], but F32 \[2\] takes 8 bytes", {"x": F32 | {"shape": [2]}}),
        bad(r"data_offsets \[0, 4\], but F16 \[1\] takes 2 bytes", {"x": F32 | {"dtype": "F16"}}),
        bad("tensor 'x' ends at byte 4 of 3; the file is cut short", {"x": F32}, b"\0\0\0"),
        bad("tensor 'x' ends at byte 12 of 4", {"x": F32 | {"data_offsets": [8, 12]}}),
        bad("tensor 'y' overlaps the one before it at byte 2", {"y": entry("F32", [1], 2, 6), "x": F32}, b"abcdef"),
        bad("tensor 'y' overlaps the one before it at byte 0", {"x": F32, "y": F32}),
        bad("bytes 0 to 4 before tensor 'x' belong to no", {"x": F32 | {"data_offsets": [4, 8]}}, b"abcdefgh"),
        bad("bytes 4 to 5 at the end of the data belong to no tensor", {"x": F32}, b"abcde"),
        bad("tensor 'x' is BOOL, but holds bytes other than 0 and 1", {"x": entry("BOOL", [2], 0, 2)}, b"\1\2"),
    ],
)
def test_a_file_that_is_not_as_the_format_says_is_refused(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for read in (lambda: load(path), lambda: load(tmp_path), lambda: load_metadata(path)):
        with pytest.raises(ValueError, match=message) as caught:
            read()
        assert str(path) in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="x does not exist"):
        load(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model.safetensors is not a regular file; give the file"):
        load(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A model in two shards, and a function that changes its index."""
    folder = tmp_path / "model"
    save(folder / "model.safetensors", {"a": np.float32([1]), "b": np.float32([2])}, max_shard_bytes=4)

    def change(value):
        (folder / "model.safetensors.index.json").write_text(value if isinstance(value, str) else json.dumps(value))
        return folder

    return change


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("", "index.json is empty"),
        ("{", "index.json is not valid JSON"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "index.json is not valid JSON: 'a' stands twice"),
        ([], "index.json is a JSON list and not an object"),
        ({}, "index.json: weight_map must hold strings by strings"),
        ({"weight_map": {"a": 1}}, "index.json: weight_map must hold strings by strings"),
        ({"weight_map": {"a": B, "b": B}}, f"tensor 'a' is not in {B}"),
        ({"weight_map": {"a": A, "b": B, "c": B}}, f"tensor 'c' is not in {B}"),
        ({"weight_map": {"a": B, "b": A}}, f"does not say that tensor 'a' is in {A}"),
        ({"weight_map": {"x": A, "b": B}}, f"does not say that tensor 'a' is in {A}"),
    ]
    + [
        ({"weight_map": {"a": name, "b": B}}, "is not a plain file name")
        for name in ["", ".", "..", f"../model/{A}", f"/tmp/{A}", f"./{A}", f"..\\{A}", f"C:{A}", "a\0b", "x" * 300]
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(folder, index, message):
    with pytest.raises(ValueError, match=message):
        load(folder(index))


def test_a_tensor_in_two_shards_is_refused(folder):
    path = folder({"weight_map": {"a": A, "b": B}})
    save(path / B, {"a": np.float32([1]), "b": np.float32([2])})
    with pytest.raises(ValueError, match=f"tensor 'a' is both in {B} and in {A}"):
        load(path)


def test_a_shard_that_is_not_there(folder):
    path = folder({"weight_map": {"a": A, "b": "model-3.safetensors"}})
    with pytest.raises(FileNotFoundError, match=r"model-3.safetensors does not exist"):
        load(path)


@pytest.mark.parametrize("name", [A, "model.safetensors.index.json"])
def test_a_link_that_leads_out_of_the_folder_is_refused(folder, name):
    path = folder({"weight_map": {"a": A, "b": B}})
    outside = (path / name).rename(path.parent / "outside")
    (path / name).symlink_to(outside)
    with pytest.raises(ValueError, match=r"leads out of its folder, to .*outside; put the file itself there"):
        load(path)
    outside.rename(path / "elsewhere")
    (path / name).unlink()
    (path / name).symlink_to("elsewhere")
    (path.parent / "link").symlink_to(path)
    assert list(load(path.parent / "link")) == ["a", "b"]
    (path / name).unlink()
    (path / name).symlink_to(name)
    with pytest.raises(FileNotFoundError):
        load(path)


def test_links_of_the_hugging_face_cache_are_followed(tmp_path):
    snapshot, blob = tmp_path / "models--x" / "snapshots" / "1234", tmp_path / "models--x" / "blobs" / "abcd"
    snapshot.mkdir(parents=True)
    save(blob, {"a": np.float32([1])})
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    assert list(load(snapshot)) == ["a"]
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blob.rename(tmp_path / "models--x" / "abcd"))
    with pytest.raises(ValueError, match="leads out of its folder"):
        load(snapshot)


# Mutations ------------------------------------------------------------------------------------------------------------


def attempt(read):
    """Either arrays or an error of the documented kinds, with little memory."""
    tracemalloc.start()
    try:
        found = read()
    except (ValueError, FileNotFoundError):
        found = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4e6
    return found


WHOLE = raw(
    {"x": entry("F32", [2, 3], 0, 24), "y": entry("BF16", [2], 24, 28), "z": entry("I8", [], 28, 29)}, bytes(range(29))
)
EDITS = st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4)


@given(EDITS, st.integers(0, len(WHOLE)) | st.just(len(WHOLE)))
@settings(max_examples=400)
def test_a_damaged_file_gives_an_error_or_arrays_of_the_right_shapes(tmp_path_factory, edits, length):
    content = bytearray(WHOLE)
    for at, byte in edits:
        content[at] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content[:length])
    found = attempt(lambda: load(path))
    if found is None:
        assert content[:length] != WHOLE
    elif content[: -len(bytes(29))] == WHOLE[:-29]:
        shapes = {name: (tensor.shape, tensor.dtype.itemsize) for name, tensor in found.items()}
        assert shapes == {"x": ((2, 3), 4), "y": ((2,), 2), "z": ((), 1)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.floats() | st.sampled_from(["F32", "BOOL", "a", A, ".."]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BOOL"]) | JSON,
        "shape": st.lists(st.integers(0, 4) | st.sampled_from([2**31, 2**62, 2**63, 2**64]), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(0, 8), st.integers(0, 8)) | JSON,
        "extra": JSON,
    },
)


@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRY | JSON, max_size=3), st.integers(0, 8))
@settings(max_examples=300)
def test_any_header_gives_an_error_or_arrays_that_fill_the_data(tmp_path_factory, header, size):
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    path.write_bytes(raw(header, bytes(size)))
    found = attempt(lambda: load(path))
    if found is not None:
        assert sum(tensor.nbytes for tensor in found.values()) == size
        assert set(found) == set(header) - {"__metadata__"}


@given(st.dictionaries(st.sampled_from(["weight_map", "metadata"]), JSON | st.dictionaries(st.text(), st.text())))
@settings(max_examples=100)
def test_any_index_gives_an_error_or_no_tensors(tmp_path_factory, index):
    path = tmp_path_factory.getbasetemp() / "indexed"
    path.mkdir(exist_ok=True)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert attempt(lambda: load(path)) in (None, {})


def test_the_limit_of_the_header_is_that_of_the_reference_library():
    content = struct.pack("<Q", files.HEADER_LIMIT + 1) + b"{}"
    with pytest.raises(safetensors.SafetensorError, match=r"[Hh]eader.*[Ll]arge"):
        safetensors.numpy.load(content)

"""PyTorch's files without PyTorch: the right arrays, nothing executed, and errors for all that is not a state dict."""

import collections
import io
import os
import pickle
import struct
import sys
import tracemalloc
import types
import zipfile
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.convert.torch_file import load_torch

# A stand-in for torch.save -------------------------------------------------------------------------------------------

STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class Stored:
    """A storage: a flat array that many tensors may share."""

    def __init__(self, array):
        self.array = np.asarray(array).reshape(-1)


class Tensor:
    """A view of a storage; strides count elements."""

    def __init__(self, storage, offset, shape, strides, *more):
        self.arguments = (storage, offset, shape, strides, False, collections.OrderedDict(), *more)


class Parameter:
    def __init__(self, tensor):
        self.tensor = tensor


def tensor(array):
    """A tensor with a storage of its own, as contiguous as the array."""
    flat = array.T.copy().T if array.flags.f_contiguous and not array.flags.c_contiguous else array.copy()
    strides = tuple(stride // array.itemsize for stride in flat.strides)
    return Tensor(Stored(flat.ravel("K")), 0, array.shape, strides)


def global_(module, name):
    found = types.FunctionType((lambda: None).__code__, {}, name)
    found.__module__, found.__qualname__ = module, name
    setattr(MODULES[module], name, found)
    return found


MODULES = {name: types.ModuleType(name) for name in ("torch", "torch._utils")}
REBUILD_TENSOR = global_("torch._utils", "_rebuild_tensor_v2")
REBUILD_PARAMETER = global_("torch._utils", "_rebuild_parameter")
KINDS = {np.dtype(dtype): global_("torch", name) for name, dtype in STORAGES.items()}


class Pickler(pickle.Pickler):
    """Writes what torch.save writes: the same names, with the storages by key and beside the pickle."""

    def __init__(self, file, stream):
        super().__init__(file, protocol=2)
        self.stream, self.storages, self.keys = stream, [], {}

    def persistent_id(self, value):
        if not isinstance(value, Stored):
            return None
        key = self.keys.setdefault(id(value), str(len(self.keys)))
        if int(key) == len(self.storages):
            self.storages.append(value)
        place = ("storage", KINDS[value.array.dtype], key, "cpu", value.array.size)
        return (*place, None) if self.stream else place

    def reducer_override(self, value):
        if isinstance(value, Tensor):
            return REBUILD_TENSOR, value.arguments
        if isinstance(value, Parameter):
            return REBUILD_PARAMETER, (value.tensor, True, collections.OrderedDict())
        return NotImplemented


def pickled(value, stream=False):
    buffer = io.BytesIO()
    pickler = Pickler(buffer, stream)
    with mock.patch.dict(sys.modules, MODULES):
        pickler.dump(value)
    return buffer.getvalue(), pickler.storages


def zipped(program, storages=(), more=None, kind=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    entries = {"model/data.pkl": program, "model/byteorder": b"little"}
    entries |= {f"model/data/{i}": storage.array.tobytes() for i, storage in enumerate(storages)}
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in (entries | {"model/version": b"3\n"} | (more or {})).items():
            if content is not None:
                archive.writestr(name, content)
    return buffer.getvalue()


SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def streamed(program, storages=(), *, keys=None, system=SYSTEM, version=1001):
    keys = [str(i) for i in reversed(range(len(storages)))] if keys is None else keys
    content = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, version, system))
    content += program + pickle.dumps(keys, 2)
    for storage in reversed(storages):
        content += struct.pack("<q", storage.array.size) + storage.array.tobytes()
    return content


def file(value, stream):
    return (streamed if stream else zipped)(*pickled(value, stream))


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "pytorch_model.bin"
        path.write_bytes(content)
        return path

    return write


both = pytest.mark.parametrize("stream", [False, True], ids=["zip", "stream"])

# What is read ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", STORAGES.values())
def test_a_tensor_of_each_type_comes_back_bit_by_bit(write, rng, stream, dtype):
    bits = rng.integers(0, 2 if dtype is np.bool_ else 256, 24 * np.dtype(dtype).itemsize, np.uint8)
    x = bits.view(dtype).reshape(2, 3, 4)
    state = collections.OrderedDict(a=tensor(x), b=Parameter(tensor(x.T)), scalar=tensor(x[0, 0, 0]))
    state["empty"] = tensor(x[:0])
    state._metadata = collections.OrderedDict({"": {"version": 1}})  # as modules have it
    found = load_torch(write(file(state, stream)))
    assert list(found) == ["a", "b", "scalar", "empty"]
    for name, wanted in {"a": x, "b": x.T, "scalar": x[0, 0, 0], "empty": x[:0]}.items():
        assert found[name].dtype == dtype
        assert found[name].shape == wanted.shape
        assert found[name].tobytes() == wanted.tobytes()
        assert not found[name].flags.writeable or not found[name].size


@both
def test_shared_transposed_and_cut_tensors_are_views_of_their_storage(write, stream):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    storage = Stored(x)
    state = {
        "all": Tensor(storage, 0, (4, 6), (6, 1)),
        "transposed": Tensor(storage, 0, (6, 4), (1, 6)),
        "cut": Tensor(storage, 7, (2, 3), (6, 2)),
        "single": Tensor(storage, 23, (1, 1), (2**62, 0)),
        "diagonal": Tensor(storage, 0, (4,), (7,)),
        "repeated": Tensor(storage, 5, (3, 2), (0, 1)),
        "none": Tensor(storage, 0, (0, 6), (6, 1)),
    }
    found = load_torch(write(file(state, stream)))
    wanted = [x, x.T, x[1:3, 1:6:2], x[3:, 5:], np.diagonal(x), np.tile([[5, 6]], (3, 1)), x[:0]]
    for name, array in zip(state, wanted, strict=True):
        np.testing.assert_array_equal(found[name], np.float32(array), strict=True)
    assert np.shares_memory(found["all"], found["transposed"])


@both
def test_a_state_dict_inside_of_a_checkpoint_is_read_by_its_key(write, stream):
    x = np.float32([1, 2])
    path = write(file({"epoch": 3, "lr": 0.1, "opt": {0: [None, (), (1,)]}, "model": {"x": tensor(x)}}, stream))
    np.testing.assert_array_equal(load_torch(path, "model")["x"], x)
    with pytest.raises(ValueError, match=r"bin: 'epoch' is a int and not a tensor; where one .* give its key"):
        load_torch(path)
    with pytest.raises(ValueError, match="the dictionary has the key 0, which is no name"):
        load_torch(path, "opt")
    with pytest.raises(ValueError, match="the file holds a int and not a dictionary of tensors"):
        load_torch(path, "epoch")
    with pytest.raises(ValueError, match="does not hold a dictionary with the key 'x'"):
        load_torch(path, "x")


def test_reading_copies_nothing(write):
    path = write(file({"x": tensor(np.zeros(10**6, np.float32))}, stream=True))
    tracemalloc.start()
    assert load_torch(path)["x"].size == 10**6
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()


# Programs -------------------------------------------------------------------------------------------------------------


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


OPEN = b"\x80\x02"
FLOATS = text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
"""The start of the description of a storage, between a mark and the number of its elements."""


def rebuild(size=b"K\2", offset=b"K\0", shape=b"K\2\x85", strides=b"K\1\x85", more=b"\x89}"):
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + FLOATS + size + b"tQ" + offset + shape + strides + more + b"tR"


def named(program):
    return OPEN + b"}" + text("x") + program + b"s."


TWO = [Stored(np.float32([1, 2]))]


def test_the_smallest_program(write):
    np.testing.assert_array_equal(load_torch(write(zipped(named(rebuild()), TWO)))["x"], [1, 2])
    more = b"\x89}}"  # the bits of a tensor, all unset
    np.testing.assert_array_equal(load_torch(write(zipped(named(rebuild(more=more)), TWO)))["x"], [1, 2])


class Attack:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@both
@pytest.mark.parametrize("function", [os.mkdir, os.system, exec, eval, getattr, __import__, collections.Counter])
def test_nothing_is_executed(write, tmp_path, monkeypatch, stream, function):
    monkeypatch.chdir(tmp_path)
    argument = {os.mkdir: "made", os.system: "mkdir made"}.get(function, "__import__('os').mkdir('made')")
    program = pickle.dumps({"x": Attack(function, argument)}, 2)
    name = f"{function.__module__}.{function.__qualname__}".replace("builtins", "__builtin__")
    path = write((streamed if stream else zipped)(program))
    with pytest.raises(ValueError, match=f"the pickle names {name}, which no state dict needs"):
        load_torch(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["torch\nload", "torch.\nFloatStorage", "torch\nFloatStorage.x", "collections\nabc"])
def test_names_are_allowed_whole(write, name):
    with pytest.raises(ValueError, match="which no state dict needs"):
        load_torch(write(zipped(named(b"c" + name.encode() + b"\n"))))


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"
ORDERED = b"ccollections\nOrderedDict\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"", "the pickle has no end"),
        (OPEN + b"}", "the pickle has no end"),
        (b"\xff", r"uses the operation b'\\xff', which no"),
        (OPEN + b".", "takes a value that it has not put anywhere"),
        (OPEN + b"t.", "takes a value that it has not put"),
        (OPEN + b"h\0.", "takes a value that it has not put"),
        (OPEN + b"}K\1\x86\x87.", "takes a value that it has not put"),
        (OPEN + b"}((0t.", "uses the operation POP, which no"),
        (OPEN + b"X\xff\xff\xff\xffabc.", "expected 4294967295 bytes in a unicodestring4, but only 4 remain"),
        (OPEN + b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0fabc.", "uses the operation BINBYTES8"),
        (OPEN + b"S'\\o'\n.", "uses the operation STRING"),
        (OPEN + b"c\\o\n\xff\n.", "the pickle names "),
        (OPEN + b"cos", "the pickle names os"),
        (OPEN + b"}r\xff\xff\xff\xff.", None),
        (OPEN + b"(i" + b"os\nsystem\n.", "uses the operation INST"),
        (OPEN + ORDERED + b")\x81.", "uses the operation NEWOBJ"),
        (OPEN + b"\x8c\2os\x8c\6system\x93.", "uses the operation SHORT_BINUNICODE"),
        (OPEN + b"\x82\1.", "uses the operation EXT1"),
        (OPEN + b"P0\n.", "uses the operation PERSID"),
        (OPEN + b"}N)R.", "calls something that it has not named"),
        (OPEN + ORDERED + b"NR.", "calls something that it has not named"),
        (OPEN + ORDERED + b"]\x85R.", "calls collections.OrderedDict in a way that no state dict needs"),
        (OPEN + TENSOR + b")R.", "calls torch._utils._rebuild_tensor_v2 in a way"),
        (OPEN + PARAMETER + b"N\x89}\x87R.", "calls torch._utils._rebuild_parameter in a way"),
        (OPEN + b"ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage in a way"),
        (named(rebuild(more=b"\x89}N}")), "calls torch._utils._rebuild_tensor_v2 in a way"),
        (named(rebuild(more=b"\x89}}" + text("neg") + b"\x88s")), "calls torch._utils._rebuild_tensor_v2 in a way"),
        (OPEN + ORDERED + b"}b.", "sets attributes of something that is no dictionary"),
        (named(rebuild() + b"}b"), "sets attributes of something that is no dictionary"),
        (OPEN + b"}K\1a.", "appends to something that is no list"),
        (OPEN + b"]K\1K\2s.", "sets items otherwise"),
        (OPEN + b"}]K\2s.", "sets items otherwise than by strings or small numbers"),
        (OPEN + b"}\x8a\x09" + bytes(8) + b"\1K\2s.", "sets items otherwise than by strings or small"),
        (OPEN + b"}(K\1u.", "sets items otherwise"),
        (OPEN + b"}Q.", "refers to something that is no storage"),
        (OPEN + b")Q.", "refers to something that is no storage"),
        (OPEN + text("storage") + b"\x85Q.", "refers to something that is no storage"),
        (OPEN + b"(" + FLOATS + b"K\2K\1tQ.", "refers to something that is no storage"),
        (named(rebuild(size=b"K\2(t")), "refers to something that is no storage"),
        (OPEN + b"(" + FLOATS + b"J\xff\xff\xff\xfftQ.", "describes a storage other than by its type, key and size"),
        (OPEN + b"(" + FLOATS + b"\x88tQ.", "describes a storage other than by"),
        (OPEN + b"(" + FLOATS.replace(text("0"), b"K\0") + b"K\2tQ.", "describes a storage other than by"),
        (OPEN + b"(" + FLOATS.replace(b"FloatStorage", b"UntypedStorage") + b"K\2tQ.", "names torch.UntypedStorage"),
        (OPEN + b"(" + FLOATS + b"K\2tQ(" + FLOATS + b"K\3tQ.", "describes storage '0' in two ways"),
        (named(TENSOR + b"(" + b"K\0" * 4 + b"\x89}tR"), "a tensor is described other than by a storage"),
        (named(rebuild(offset=b"J\xff\xff\xff\xff")), "a tensor is described other than by"),
        (named(rebuild(shape=b"J\xff\xff\xff\xff\x85")), "a tensor is described other than by"),
        (named(rebuild(shape=b"G" + bytes(8) + b"\x85")), "a tensor is described other than by"),
        (named(rebuild(strides=b"J\xff\xff\xff\xff\x85")), "a tensor is described other than by"),
        (named(rebuild(shape=b"\x8a\x09" + bytes(8) + b"\1\x85")), "a tensor is described other than by"),
        (named(rebuild(strides=b")")), "a tensor has 1 sizes and 0 strides"),
        (named(rebuild(shape=b"(" + b"K\1" * 65 + b"t", strides=b"(" + b"K\1" * 65 + b"t")), "at most 64 of each"),
        (named(rebuild(offset=b"K\1")), "a tensor reaches element 2 of storage '0', which has 2"),
        (named(rebuild(offset=b"K\2", shape=b")", strides=b")")), "a tensor reaches element 2 of storage '0'"),
        (named(rebuild(strides=b"K\2\x85")), "a tensor reaches element 2 of storage '0'"),
        (named(rebuild(shape=b"J\0\0\0\x7f\x85", strides=b"K\0\x85")), r"\(2130706432,\) has more elements than stor"),
        (named(rebuild(shape=b"K\0\x8a\x08" + b"\xff" * 7 + b"\x7f\x86", strides=b"K\0K\0\x86")), "array is too big"),
        (named(rebuild(size=b"K\3")), "storage '0' has no entry of 12 bytes in the zip file"),
        (named(rebuild().replace(text("0"), text("../0"))), "storage '../0' has no entry of 8 bytes"),
        (OPEN + b"].", "the file holds a list and not a dictionary of tensors"),
        (OPEN + b"}K\1" + rebuild() + b"s.", "the dictionary has the key 1, which is no name of a tensor"),
        (named(b"}"), "'x' is a dictionary and not a tensor"),
        (OPEN + b"}q\0" + text("x") + b"h\0s.", "'x' is a dictionary and not a tensor"),
    ],
)
def test_a_program_that_no_state_dict_needs_is_refused(write, program, message):
    path = write(zipped(program, TWO))
    if message is None:
        assert load_torch(path) == {}
        return
    with pytest.raises(ValueError, match=message) as caught:
        load_torch(path)
    assert str(path) in str(caught.value)


def test_nested_values_that_double_at_each_level_cost_nothing(write):
    """Fifty tuples of twice the one before: whoever walked them would not come back."""
    program = named(b")" + b"q\0h\0\x86" * 50)
    with pytest.raises(ValueError, match="'x' is a tuple and not a tensor"):
        load_torch(write(zipped(program)))


# Files ----------------------------------------------------------------------------------------------------------------

GOOD, GOOD_STREAM = named(rebuild()), named(rebuild(size=b"K\2N"))
VALUE = np.float32([1, 2]).tobytes()


def directory(content, field, value):
    """Overwrite a field of the zip file's directory in the record of the storage."""
    at = content.rindex(b"PK\1\2", 0, content.rindex(b"model/data/0"))
    return content[: at + field] + value + content[at + field + len(value) :]


ZIP = zipped(GOOD, TWO)
STREAM = streamed(GOOD_STREAM, TWO)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"abc", "neither a zip file nor a stream"),
        (GOOD, "neither a zip file nor a stream"),
        (b"PK\3\4", "the zip file is damaged: File is not a zip file"),
        (ZIP[:-30], "the zip file is damaged"),
        (zipped(GOOD, TWO, {"other/data.pkl": b""}), "holds 2 entries NAME/data.pkl and not one"),
        (zipped(GOOD, TWO, {"model/data.pkl": None}), "holds 0 entries"),
        (zipped(GOOD, TWO, {"model/byteorder": b"big"}), "the numbers are big-endian"),
        (zipped(GOOD, TWO, {"model/data/0": None}), "storage '0' has no entry of 8 bytes"),
        (zipped(GOOD, TWO, {"model/data/0": bytes(7)}), "storage '0' has no entry of 8 bytes"),
        (zipped(GOOD, TWO, kind=zipfile.ZIP_DEFLATED), "is compressed or encrypted, as torch.save never does"),
        (directory(ZIP, 8, b"\1\0"), "entry 'model/data/0' is compressed or encrypted"),
        (directory(ZIP, 20, b"\7"), "entry 'model/data/0' is compressed or encrypted"),
        (directory(ZIP, 20, struct.pack("<II", 2**31, 2**31)), "its entries are larger than the file"),
        (directory(ZIP, 42, struct.pack("<I", 3)), "entry 'model/data/0' is not where its directory says"),
        (directory(ZIP, 42, struct.pack("<I", 2**31)), "entry 'model/data/0' is not where its directory says"),
        (ZIP.replace(VALUE, bytes(8)), "the checksum of entry 'model/data/0' is wrong"),
        (ZIP.replace(b"model/version", b"model/data/0\0", 2), "two entries of the zip file have one name"),
        (
            zipped(named(rebuild().replace(b"Float", b"Char")), [Stored(np.int8([0, 1]))]).replace(b"Char", b"Bool"),
            "the checksum of entry 'model/data.pkl' is wrong",
        ),
        (
            zipped(named(rebuild().replace(b"Float", b"Bool")), [Stored(np.int8([0, 2]))]),
            "storage '0' is boolean, but holds bytes other than 0 and 1",
        ),
        (streamed(GOOD_STREAM, TWO, version=1000), "the stream is not of version 1001 and little-endian"),
        (streamed(GOOD_STREAM, TWO, system={"little_endian": False}), "the stream is not of version 1001"),
        (streamed(GOOD_STREAM, TWO, system=[]), "the stream is not of version 1001"),
        (streamed(GOOD_STREAM, TWO, keys={"0": 0}), "the storages' keys are not a list of strings"),
        (streamed(GOOD_STREAM, TWO, keys=[0]), "the storages' keys are not a list of strings"),
        (streamed(GOOD_STREAM, TWO, keys=["1"]), "the storages in the stream are not those"),
        (streamed(GOOD_STREAM, TWO, keys=["0", "0"]), "the storages in the stream are not those"),
        (streamed(GOOD_STREAM, TWO, keys=[]), "the storages in the stream are not those"),
        (streamed(GOOD_STREAM, [Stored(np.zeros(3, np.float32))]), "storage '0' is not of the 2 elements that its"),
        (STREAM[:-16], "storage '0' is not of the 2 elements"),
        (STREAM[:-1], "storage '0' ends after the file; the file is cut short"),
        (STREAM + b"\0", "1 bytes are left over at the end of the stream"),
    ],
)
def test_a_damaged_file_is_refused(write, content, message):
    path = write(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_torch(path)
    assert str(path) in str(caught.value)


def test_the_files_that_were_damaged_are_good_ones(write):
    for content in (ZIP, STREAM):
        np.testing.assert_array_equal(load_torch(write(content))["x"], [1, 2])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="x does not exist"):
        load_torch(tmp_path / "x")


# Mutations ------------------------------------------------------------------------------------------------------------

STATE = {"a": tensor(np.float32([[1, 2, 3], [4, 5, 6]])), "b": Parameter(tensor(np.array([True, False])))}
WHOLE = {"zip": file(STATE, stream=False), "stream": file(STATE, stream=True)}
SHAPES = {"a": (2, 3), "b": (2,)}


def attempt(content, folder):
    """Either arrays or a ValueError, with little memory."""
    path = folder / "damaged.pt"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        found = load_torch(path)
    except ValueError:
        found = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4e6
    if found is not None:
        assert sum(array.astype(np.float32).size for array in found.values()) <= len(content)
    return found


@pytest.mark.parametrize("whole", WHOLE.values(), ids=WHOLE)
def test_damaged_files_give_an_error_or_arrays(tmp_path_factory, whole):
    folder = tmp_path_factory.getbasetemp()
    edits = st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=3)

    @given(edits, st.just(len(whole)) | st.integers(0, len(whole)))
    @settings(max_examples=500)
    def check(edits, length):
        content = bytearray(whole)
        for at, byte in edits:
            content[at] = byte
        found = attempt(bytes(content[:length]), folder)
        if content[:length] == whole:
            assert {name: array.shape for name, array in found.items()} == SHAPES

    check()


OPERATIONS = b"\x80\2}])(tKMJQRsubaqhX\x85\x86\x87\x88\x89NG.c\x8a\1\0\xff"


@given(st.lists(st.sampled_from(OPERATIONS), max_size=30), st.data())
@settings(max_examples=500)
def test_programs_of_random_operations_give_an_error_or_arrays(tmp_path_factory, operations, data):
    parts = [bytes([operation]) for operation in operations]
    for part in data.draw(st.lists(st.sampled_from([rebuild(), FLOATS, TENSOR, ORDERED, text("x")]), max_size=4)):
        parts.insert(data.draw(st.integers(0, len(parts))), part)
    attempt(zipped(OPEN + b"".join(parts) + b".", TWO), tmp_path_factory.getbasetemp())

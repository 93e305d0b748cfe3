"""GGUF: blocks against decoders written from the format's definition, and files that are not as the format says."""

import struct
import sys
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf_files import pair, raw, row, text
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.convert.gguf import TYPES, GGUFFile

# Decoders of one block, element by element ----------------------------------------------------------------------------


def half(content, at):
    return float(np.frombuffer(content, "<f2", 1, at)[0])


def nibbles(content):
    """Of 16 bytes: the low halves are elements 0 to 15, the high halves 16 to 31."""
    return [byte & 15 for byte in content] + [byte >> 4 for byte in content]


def q4_0(b):
    return [half(b, 0) * (q - 8) for q in nibbles(b[2:18])]


def q4_1(b):
    return [half(b, 0) * q + half(b, 2) for q in nibbles(b[4:20])]


def q5_0(b):
    (fifth,) = struct.unpack("<I", b[2:6])
    return [half(b, 0) * ((q | (fifth >> j & 1) << 4) - 16) for j, q in enumerate(nibbles(b[6:22]))]


def q8_0(b):
    return [half(b, 0) * q for q in struct.unpack("<32b", b[2:34])]


def q4_k(b):
    """Eight groups of 32 share 6-bit scales and minima, packed into 12 bytes."""
    s, weights = b[4:16], []
    for j in range(8):
        scale = s[j] & 63 if j < 4 else (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
        minimum = s[j + 4] & 63 if j < 4 else (s[j + 4] >> 4) | (s[j] >> 6) << 4
        quants = b[16 + 32 * (j // 2) : 16 + 32 * (j // 2) + 32]
        weights += [half(b, 0) * scale * (q >> 4 * (j % 2) & 15) - half(b, 2) * minimum for q in quants]
    return weights


def q6_k(b):
    """Sixteen groups of 16 share 8-bit scales; a weight has 4 bits in one place and 2 in another."""
    weights = []
    for i in range(256):
        n, part, j = i // 128, i % 128 // 32, i % 32
        low = b[64 * n + 32 * (part % 2) + j] >> 4 * (part // 2) & 15
        high = b[128 + 32 * n + j] >> 2 * part & 3
        (scale,) = struct.unpack("<b", b[192 + i // 16 : 193 + i // 16])
        weights.append(half(b, 208) * scale * ((low | high << 4) - 32))
    return weights


# Number, weights and bytes of a block, where its halves stand, and its decoder.
BLOCKS = {
    "F32": (0, 1, 4, [], lambda b: struct.unpack("<f", b)),
    "F16": (1, 1, 2, [], lambda b: [half(b, 0)]),
    "BF16": (30, 1, 2, [], lambda b: struct.unpack("<f", b"\0\0" + b)),
    "Q4_0": (2, 32, 18, [0], q4_0),
    "Q4_1": (3, 32, 20, [0, 2], q4_1),
    "Q5_0": (6, 32, 22, [0], q5_0),
    "Q8_0": (8, 32, 34, [0], q8_0),
    "Q4_K": (12, 256, 144, [0, 2], q4_k),
    "Q6_K": (14, 256, 210, [208], q6_k),
}


def blocks(kind, number, rng):
    """Random blocks; the scales are powers of two, so that float32 holds every weight exactly."""
    _, _, size, halves, _ = BLOCKS[kind]
    if not halves:
        dtype = {"F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}[kind]
        return rng.normal(size=number).astype(dtype).tobytes()
    content = rng.integers(0, 256, (number, size), np.uint8)
    for at in halves:
        scales = 2.0 ** rng.integers(-4, 3, number) * rng.choice([-1, 1], number)
        content[:, at : at + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    return content.tobytes()


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


# What is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_what_the_format_defines(write, rng, kind):
    number, weights, size, _, decode = BLOCKS[kind]
    content = blocks(kind, 6, rng)
    # NumPy's (3, 2 blocks) is (2 blocks, 3) in the file.
    file = GGUFFile(write(raw(rows=[row("x", [2 * weights, 3], number, 0)], data=content)))
    assert file.tensors["x"].shape == (3, 2 * weights)
    assert file.tensors["x"].type == kind
    wanted = np.concatenate([decode(content[at : at + size]) for at in range(0, len(content), size)])
    found = file.tensor("x")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted.reshape(3, 2 * weights))


def test_files_of_the_reference_writer(tmp_path, rng):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "some-model")
    x = rng.normal(size=(4, 3, 64)).astype(np.float32)
    tokens, scores = ["<s>", "é", "", "a b"], [0.5, -1.0]
    writer.add_uint32("some-model.block_count", 30)
    writer.add_float32("eps", 0.5)
    writer.add_bool("bos", False)
    writer.add_int64("low", -(2**40))
    writer.add_array("tokens", tokens)
    writer.add_array("scores", scores)
    writer.add_array("flags", [True, False])
    writer.add_custom_alignment(64)
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "F16"):
        quantised = gguf.quantize(x, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(kind, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("odd", np.arange(3, dtype=np.float32))
    writer.add_tensor("F32", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    arrays = {key: file.metadata[key] for key in ("scores", "flags")}
    assert {key: value for key, value in file.metadata.items() if key not in arrays} == {
        "general.architecture": "some-model",
        "general.alignment": 64,
        "some-model.block_count": 30,
        "eps": 0.5,
        "bos": False,
        "low": -(2**40),
        "tokens": tokens,
    }
    assert file.metadata["bos"] is False
    np.testing.assert_array_equal(arrays["scores"], np.float32(scores), strict=True)
    np.testing.assert_array_equal(arrays["flags"], [True, False], strict=True)
    assert list(file.tensors) == ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "F16", "odd", "F32"]
    np.testing.assert_array_equal(file.tensor("F32"), x)
    np.testing.assert_array_equal(file.tensor("odd"), [0, 1, 2])
    # Rounding is half a step at most: of 1/16 to 1/128 of the largest weight (4.1 here), or of the mantissa.
    steps = {"Q4_0": 1 / 8, "Q4_1": 2 / 15, "Q5_0": 1 / 16, "Q8_0": 1 / 127, "BF16": 2**-7, "F16": 2**-10}
    for kind, step in steps.items():
        np.testing.assert_allclose(file.tensor(kind), x, atol=step * abs(x).max())
        reference = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == kind)
        np.testing.assert_array_equal(
            file.tensor(kind), gguf.dequantize(reference.data, reference.tensor_type).reshape(x.shape)
        )


def test_a_scalar_a_file_without_tensors_and_one_of_version_2(write):
    file = GGUFFile(write(raw(rows=[row("x", [], 0, 0)], data=np.float32([2.5]).tobytes(), version=2)))
    assert file.tensor("x").shape == ()
    assert file.tensor("x") == 2.5
    assert GGUFFile(write(raw([pair("a", 8, text("b"))]))).metadata == {"a": "b"}


def test_broken_scales_give_weights_that_are_not_finite(write):
    """A warning from inside another package would not say which file it is about."""
    content = np.float16([np.inf]).tobytes() + bytes(32)
    file = GGUFFile(write(raw(rows=[row("x", [32], 8, 0)], data=content)))
    assert np.isnan(file.tensor("x")).all()


def test_a_tensor_that_is_not_there(write):
    with pytest.raises(KeyError, match="has no tensor 'y'; it has x, "):
        GGUFFile(write(raw(rows=[row("x", [1], 0, 0)], data=bytes(4)))).tensor("y")


def test_types_without_a_tested_reader_are_refused_when_they_are_asked_for(write):
    data = bytes(32) + bytes(84)
    file = GGUFFile(write(raw(rows=[row("x", [1], 0, 0), row("y", [256], 10, 32)], data=data)))
    assert file.tensor("x") == 0
    with pytest.raises(ValueError, match=r"model.gguf: tensor 'y' is Q2_K; requantise it to F32, F16"):
        file.tensor("y")


def test_the_missing_package_is_named(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "jaxformer\[gguf\]"'):
        GGUFFile(write(raw()))


# What is refused ------------------------------------------------------------------------------------------------------

MANY = struct.pack("<Q", 2**60)
X = row("x", [1], 0, 0)


def bad(message, content):
    return pytest.param(content, message, id=message[:50])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        bad("is empty", b""),
        bad("the magic number takes 4 bytes, but 2 are left; the file is cut short", b"GG"),
        bad("starts with b'GGML' and not with b'GGUF'", raw(magic=b"GGML")),
        bad("is of version 1 ", raw(version=1)),
        bad("is of version 50331648 .*big-endian.*; convert it", raw(version=3 << 24)),
        bad("the number of tensors takes 8 bytes, but 4 are left", raw()[:12]),
        bad(f"the number of tensors is {2**60}, too many for the file", b"GGUF\3\0\0\0" + MANY + bytes(64)),
        bad(f"the number of metadata is {2**60}, too many", b"GGUF\3\0\0\0" + bytes(8) + MANY + bytes(64)),
        bad("the length of a key of the metadata is 1152921504606846976, too many", raw([MANY + bytes(64)])),
        bad("a key of the metadata at byte 32 is not UTF-8", raw([pair(b"\xff", 4, bytes(4))])),
        bad("'k' stands twice in the metadata", raw([pair("k", 4, bytes(4))] * 2)),
        bad("'k' has type 13, but a number, string or array", raw([pair("k", 13, bytes(8))])),
        bad("'k' has type 9, but a number, string or array", raw([pair("k", 9, struct.pack("<IQ", 9, 0))])),
        bad("'k' is boolean, but holds bytes other than 0 and 1", raw([pair("k", 7, b"\2")])),
        bad("'k' is boolean, but", raw([pair("k", 9, struct.pack("<IQ", 7, 2) + b"\1\2")])),
        bad("the length of 'k' is .*, too many", raw([pair("k", 9, struct.pack("<I", 8) + MANY + bytes(64))])),
        bad("the length of 'k' is .*, too many", raw([pair("k", 9, struct.pack("<I", 6) + MANY + bytes(64))])),
        bad("the length of 'k' is .*, too many", raw([pair("k", 8, MANY + bytes(64))])),
        bad("general.alignment is 0 and not a power of two", raw([pair("general.alignment", 4, bytes(4))])),
        bad("general.alignment is 24 and", raw([pair("general.alignment", 4, struct.pack("<I", 24))])),
        bad("general.alignment is '8' and", raw([pair("general.alignment", 8, text("8"))])),
        bad("general.alignment is 8.0 and", raw([pair("general.alignment", 6, struct.pack("<f", 8))])),
        bad("tensor 'x' stands twice in the table", raw(rows=[X, X], data=bytes(64))),
        bad("tensor 'x' has 5 sizes; the format has at most 4", raw(rows=[row("x", [1] * 5, 0, 0)], data=bytes(4))),
        bad("tensor 'x' has a type with the number 99", raw(rows=[row("x", [1], 99, 0)], data=bytes(4))),
        bad(r"tensor 'x' has shape \(2, 0\), without any", raw(rows=[row("x", [0, 2], 0, 0)], data=bytes(4))),
        bad("tensor 'x' has rows of 33, which are no whole Q8_0", raw(rows=[row("x", [33], 8, 0)], data=bytes(68))),
        bad("tensor 'x' has rows of 1, which are no whole Q8_0", raw(rows=[row("x", [], 8, 0)], data=bytes(68))),
        bad("tensor 'x' is at byte 32 of the data, not at 0", raw(rows=[row("x", [1], 0, 32)], data=bytes(64))),
        bad("tensor 'y' is at byte 0 of the data, not at 32", raw(rows=[X, row("y", [1], 0, 0)], data=bytes(64))),
        bad("tensor 'y' is at byte 4 of the data, not at 32", raw(rows=[X, row("y", [1], 0, 4)], data=bytes(64))),
        bad("tensor 'x' ends after byte 67; it is cut short", raw(rows=[X], data=bytes(3))),
        bad("tensor 'x' ends after byte 100", raw(rows=[row("x", [2**63, 2**63], 0, 0)], data=bytes(4))),
    ],
)
def test_a_file_that_is_not_as_the_format_says_is_refused(write, content, message):
    path = write(content)
    with pytest.raises(ValueError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="x does not exist"):
        GGUFFile(tmp_path / "x")


# Mutations ------------------------------------------------------------------------------------------------------------

ROWS = {"x": ([32, 2], "Q8_0", 0), "y": ([4], "F32", 96), "z": ([256], "Q6_K", 128)}
PAIRS = [
    pair("general.architecture", 8, text("model")),
    pair("general.alignment", 4, struct.pack("<I", 32)),
    pair("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
    pair("scores", 9, struct.pack("<IQ2f", 6, 2, 0.5, 1.5)),
    pair("flag", 7, b"\1"),
]
WHOLE = raw(PAIRS, [row(name, sizes, BLOCKS[kind][0], at) for name, (sizes, kind, at) in ROWS.items()], bytes(338))
HEAD = len(WHOLE) - 338
EDITS = st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=3)


@given(EDITS, st.just(len(WHOLE)) | st.integers(0, len(WHOLE)))
@settings(max_examples=500)
def test_a_damaged_file_gives_an_error_or_arrays_of_the_right_shapes(tmp_path_factory, edits, length):
    content = bytearray(WHOLE)
    for at, byte in edits:
        content[at] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[:length])
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        found = {name: file.tensor(name) for name in file.tensors}
    except ValueError:
        found = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4e6
    if found is None:
        assert content[:length] != WHOLE
    elif content[:HEAD] == WHOLE[:HEAD]:
        assert {name: tensor.shape for name, tensor in found.items()} == {"x": (2, 32), "y": (4,), "z": (256,)}


@given(st.lists(st.tuples(st.integers(0, HEAD // 4), st.sampled_from([0, 1, 2, 7, 8, 9, 33, 2**31, 2**32 - 1]))))
@settings(max_examples=300)
def test_numbers_out_of_place_give_an_error_or_arrays(tmp_path_factory, edits):
    """Whole words, so that lengths, counts and types become large at once."""
    content = bytearray(WHOLE)
    for at, word in edits:
        content[4 * at : 4 * at + 4] = struct.pack("<I", word)
    path = tmp_path_factory.getbasetemp() / "words.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        sizes = sum(file.tensor(name).size for name in file.tensors)
    except ValueError:
        sizes = 0
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4e6
    assert sizes <= 2 * len(WHOLE)

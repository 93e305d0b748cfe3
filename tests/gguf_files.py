"""Writers of GGUF files: of their parts, whatever they are told, and of whole files of Python values and arrays."""

import struct

import numpy as np


def text(value):
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def row(name, sizes, kind, offset):
    """A line of the table; sizes innermost first."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def raw(pairs=(), rows=(), data=b"", *, alignment=32, version=3, magic=b"GGUF"):
    head = magic + struct.pack("<IQQ", version, len(rows), len(pairs)) + b"".join(pairs) + b"".join(rows)
    return head + bytes(-len(head) % alignment) + data


def value(x):
    """The number of a value's type, and its bytes."""
    if isinstance(x, bool):
        return 7, struct.pack("<?", x)
    if isinstance(x, int):
        return (4, struct.pack("<I", x)) if 0 <= x < 2**32 else (11, struct.pack("<q", x))
    if isinstance(x, float):
        return 6, struct.pack("<f", x)
    if isinstance(x, str):
        return 8, text(x)
    if isinstance(x, list):
        return 9, struct.pack("<IQ", 8, len(x)) + b"".join(text(entry) for entry in x)
    kind = {"<i4": 5, "<f4": 6}[x.dtype.str]
    return 9, struct.pack("<IQ", kind, len(x)) + x.tobytes()


def whole(metadata, tensors=None):
    """A file of these metadata and of float32 tensors."""
    rows, data = [], b""
    for name, array in (tensors or {}).items():
        rows.append(row(name, array.shape[::-1], 0, len(data)))
        content = np.asarray(array, "<f4").tobytes()
        data += content + bytes(-len(content) % 32)
    return raw([pair(key, *value(x)) for key, x in metadata.items()], rows, data)

"""Pickles of PyTorch's state dicts, interpreted without calling anything that they name.

    pickle = a program for a stack machine: push, remember, collect, call

Python's own interpreter imports and calls whatever a program names. The one here knows numbers, strings, tuples, lists
and dictionaries, and just the names that a state dict needs; these, whatever they are called with, make descriptions of
tensors and nothing else. There is no instance, class or function that a program could reach.

References:
  https://docs.python.org/3/library/pickletools.html
"""

import pickletools
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_STORAGES: dict[str, np.dtype[Any]] = {
    "torch DoubleStorage": np.dtype("<f8"),
    "torch FloatStorage": np.dtype("<f4"),
    "torch HalfStorage": np.dtype("<f2"),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch LongStorage": np.dtype("<i8"),
    "torch IntStorage": np.dtype("<i4"),
    "torch ShortStorage": np.dtype("<i2"),
    "torch CharStorage": np.dtype("i1"),
    "torch ByteStorage": np.dtype("u1"),
    "torch BoolStorage": np.dtype("bool"),
}
_DICT, _TENSOR, _PARAMETER = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_OPERATIONS = {
    *_CONSTANTS,
    *_LITERALS,
    *("PROTO", "MARK", "STOP", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "EMPTY_DICT", "EMPTY_LIST"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("GLOBAL", "BINPERSID", "REDUCE", "BUILD"),
}
_GLOBALS = {_DICT, _TENSOR, _PARAMETER, *_STORAGES}
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}


class Storage(NamedTuple):
    """So many elements in a row, found in the file by their key."""

    key: str
    dtype: np.dtype[Any]
    size: int


class Tensor(NamedTuple):
    """A place in a storage, checked to lie inside of it; offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(NamedTuple):
    name: str


class Interpreter:
    """Runs pickles of numbers, strings, containers and tensors' places; remembers the storages that they name."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}

    def run(self, program: Any) -> Any:
        """Read one pickle from an open file, up to its end, and return the value that it describes."""
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        try:
            while (operation := _operation(program))[0] != "STOP":
                self._step(*operation)
            return self._stack.pop()
        except (IndexError, KeyError) as error:
            raise ValueError("the pickle takes a value that it has not put anywhere") from error

    def _step(self, name: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match name:
            case "PROTO":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._take(int(name[-1]))))
            case "TUPLE":
                stack.append(tuple(self._take()))
            case "APPEND" | "APPENDS":
                self._append(self._take(1) if name == "APPEND" else self._take())
            case "SETITEM" | "SETITEMS":
                self._set(self._take(2) if name == "SETITEM" else self._take())
            case "GLOBAL":
                if argument not in _GLOBALS:
                    raise ValueError(f"the pickle names {'.'.join(argument.split(' '))}, which no state dict needs")
                stack.append(_Global(argument))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                function, arguments = self._take(2)
                stack.append(_call(function, arguments))
            case "BUILD":  # Attributes of a state dict, such as the versions of the modules.
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise ValueError("the pickle sets attributes of something that is no dictionary")
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case _:  # A literal.
                stack.append(argument)

    def _take(self, number: int | None = None) -> list[Any]:
        """Pop so many values, or those above the last mark, in the order in which they were pushed."""
        at = self._marks.pop() if number is None else len(self._stack) - number
        if not 0 <= at <= len(self._stack):
            raise IndexError
        taken = self._stack[at:]
        del self._stack[at:]
        return taken

    def _append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("the pickle appends to something that is no list")
        self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        keys, target = values[::2], self._stack[-1]
        # Long numbers can be chosen to collide in the dictionary, which then takes time quadratic in its size.
        good = all(type(key) is str or (type(key) is int and abs(key) < 2**31) for key in keys)
        if type(target) is not dict or len(values) % 2 or not good:
            raise ValueError("the pickle sets items otherwise than by strings or small numbers in a dictionary")
        target.update(zip(keys, values[1::2], strict=True))

    def _storage(self, place: Any) -> Storage:
        # A stream adds a sixth value, None unless the storage is a part of another one.
        if type(place) is not tuple or place[:1] != ("storage",) or place[5:] not in ((), (None,)) or len(place) < 5:
            raise ValueError("the pickle refers to something that is no storage")
        _, kind, key, _, size, *_ = place
        if not isinstance(kind, _Global) or kind.name not in _STORAGES or type(key) is not str or not _sizes((size,)):
            raise ValueError("the pickle describes a storage other than by its type, key and size")
        storage = Storage(key, _STORAGES[kind.name], size)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"the pickle describes storage {key!r} in two ways")
        return storage


def _operation(program: Any) -> tuple[str, Any]:
    """Read the name and the argument of the next operation; the argument only if the operation is known here."""
    code = program.read(1)
    if not code:
        raise ValueError("the pickle has no end")
    name = _OPCODES[code].name if code in _OPCODES else repr(code)
    if name not in _OPERATIONS:
        raise ValueError(f"the pickle uses the operation {name}, which no state dict needs")
    if name == "GLOBAL":  # Two lines; pickletools would take backslashes in them for escapes.
        return name, b" ".join(program.readline().removesuffix(b"\n") for _ in range(2)).decode("ascii", "replace")
    argument = _OPCODES[code].arg
    return name, argument.reader(program) if argument is not None else None


def _call(function: Any, arguments: Any) -> Any:
    """Do what a name of a state dict would do, with descriptions."""
    if not isinstance(function, _Global) or type(arguments) is not tuple:
        raise ValueError("the pickle calls something that it has not named")
    if function.name == _DICT and not arguments:
        return {}
    # The trailing arguments say whether gradients are wanted, hooks, and bits such as "negated", which must be unset.
    if function.name == _TENSOR and len(arguments) in (6, 7) and arguments[6:] in ((), (None,), ({},)):
        return _tensor(*arguments[:4])
    if function.name == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], Tensor):
        return arguments[0]
    raise ValueError(f"the pickle calls {'.'.join(function.name.split(' '))} in a way that no state dict needs")


def _sizes(values: Any) -> bool:
    return type(values) is tuple and all(type(size) is int and 0 <= size < 2**63 for size in values)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
    if not isinstance(storage, Storage) or not _sizes((offset,)) or not _sizes(shape) or not _sizes(strides):
        raise ValueError("a tensor is described other than by a storage, an offset, sizes and strides >= 0")
    if len(shape) != len(strides) or len(shape) > 64:
        raise ValueError(f"a tensor has {len(shape)} sizes and {len(strides)} strides; at most 64 of each")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and last >= storage.size:
        raise ValueError(f"a tensor reaches element {last} of storage {storage.key!r}, which has {storage.size}")
    if prod(shape) > storage.size:  # with strides of 0, a few bytes would pass for a large array
        raise ValueError(f"a tensor of shape {shape} has more elements than storage {storage.key!r}, {storage.size}")
    return Tensor(storage, offset, shape, strides)

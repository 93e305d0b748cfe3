"""The keys of config.json as fields of a Config and back, by one table that says both directions.

    {"d_model": size("n_embd"), "activation": activation("activation_function"), ...}

Values are untrusted: each is checked under the name that it has in the file. What the models of a family always are is
not in the file; what would make another model of them is refused by name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.checks import check_positive, check_size
from jaxformer.config import Config
from jaxformer.rotary import Rotary

Fields = dict[str, Any]

REQUIRED = object()
ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Names of activations in config.json; of several for one function the first is written."""
_LARGEST = 2**31 - 1
MOST_LAYERS = 10_000
"""Layers above which config.json is refused; a config makes something of each."""
_REFUSED: Fields = {"quantization_config": None, "is_encoder_decoder": False, "add_cross_attention": False}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of config.json.

    Attributes:
      names: its spellings; the first is written.
      read: makes the field of (name, value), or raises ValueError.
      write: makes the value of the field.
      default: the field where the key is not there; REQUIRED: that is an error.
    """

    names: tuple[str, ...]
    read: Callable[[str, Any], Any]
    write: Callable[[Any], Any] = lambda field: field
    default: Any = REQUIRED

    def get(self, source: Mapping[str, Any]) -> Any:
        """Return the field that config.json says."""
        for name in self.names:
            if name in source:
                return self.read(name, source[name])
        if self.default is REQUIRED:
            raise ValueError(f"config.json lacks {self.names[0]!r}; the model cannot be built without it")
        return self.default


def size(*names: str, default: Any = REQUIRED, most: int = _LARGEST) -> Key:
    """Return the key of a size; null is allowed where the default is None."""

    def read(name: str, value: Any) -> Any:
        check_size(name, value, optional=default is None)
        if value is not None and value > most:
            raise ValueError(f"{name}={value} must be at most {most}")
        return value

    return Key(names, read, default=default)


def number(*names: str, default: Any = REQUIRED) -> Key:
    """Return the key of a positive number; null is allowed where the default is None."""

    def read(name: str, value: Any) -> float | None:
        check_positive(name, value, optional=default is None)
        if value is not None and value > _LARGEST:
            raise ValueError(f"{name}={value} must be at most {_LARGEST}")
        return None if value is None else float(value)

    return Key(names, read, default=default)


def rate(*names: str) -> Key:
    """Return the key of a dropout rate."""

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{name}={value!r} must be a number from 0 up to, but without, 1")
        return float(value)

    return Key(names, read, default=0.0)


def flag(*names: str, default: Any = REQUIRED) -> Key:
    """Return the key of a choice between true and false."""

    def read(name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError(f"{name}={value!r} must be true or false")
        return value

    return Key(names, read, default=default)


def activation(*names: str, default: Any = REQUIRED) -> Key:
    """Return the key of an activation's name."""

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ValueError(f"{name}={value!r} is not an activation of this package; it has {sorted(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    written = {field: name for name, field in reversed(ACTIVATIONS.items())}
    return Key(names, read, written.__getitem__, default)


LABELLED = ("classifier", "token_classifier")
"""Heads that have classes."""


def num_labels(source: Mapping[str, Any]) -> int:
    """Return the number of classes of a classifier, which config.json says by their names, or not at all if it is 2."""
    names = source.get("id2label")
    if names is not None and not isinstance(names, Mapping):
        raise ValueError(f"id2label={names!r} must be an object from numbers to names")
    count = source.get("num_labels", 2 if names is None else len(names))
    check_size("num_labels" if "num_labels" in source else "the number of names in id2label", count)
    if names is not None and count != len(names):
        raise ValueError(f"num_labels={count}, but id2label names {len(names)} classes; they must agree")
    return int(count)


def labels(config: Config) -> Fields:
    """Return the names of the classes, which are no part of a config: numbers, as the library makes them."""
    names = [f"LABEL_{i}" for i in range(config.num_labels or 0)]
    if not names:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def check_refused(source: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Refuse a key that says something else than the one value that is understood.

    Raises:
      ValueError: the key, what it says, and what it may say.
    """
    for name, value in (_REFUSED | dict(only)).items():
        if source.get(name) is not None and source[name] != value:
            raise ValueError(f"config.json says {name}={source[name]!r}, which is not supported; only {value!r} is")


# One form of a config -------------------------------------------------------------------------------------------------


def plain(config: Config) -> Config:
    """Return the same model with each field that only repeats a default, or counts for nothing, at its default."""
    sizes = config.sizes
    defaults: Fields = {field.name: field.default for field in dataclasses.fields(Config)}
    resets = {
        "num_kv_heads": config.num_kv_heads == config.num_heads,
        "num_distinct_layers": {config.num_distinct_layers} == {config.num_layers, config.of_decoder.num_layers},
        "d_head": sizes["H"] * config.num_heads == config.d_model,
        "d_ff": sizes["F"] == 4 * config.d_model,
        "num_decoder_layers": config.num_decoder_layers == config.num_layers,
        "decoder_d_ff": config.decoder_d_ff == sizes["F"],
        "attention_scale": config.scale == sizes["H"] ** -0.5,
        "final_norm": config.final_norm == (config.residual != "post"),
        "qkv_bias": config.qkv_bias == config.bias,
        "logit_scale": config.logit_scale == 1,
        "relative_buckets": config.positions != "relative",
        "relative_reach": config.positions != "relative",
    }
    longer = max(config, config.of_decoder, key=lambda stack: stack.num_layers)  # a pattern is of both stacks
    rotaries = tuple(_plain_rotary(rotary, sizes["H"]) for rotary in longer.rotaries)
    return dataclasses.replace(
        config,
        window=_shortest(longer.windows),
        rotary=_shortest(rotaries) if config.positions == "rotary" else Rotary(),
        **{name: defaults[name] for name, reset in resets.items() if reset},
    )


def _plain_rotary(rotary: Rotary, head: int) -> Rotary:
    used = {
        "none": (),
        "linear": ("factor",),
        "ntk": ("factor",),
        "by_parts": ("factor", "original_len", "slow", "fast"),
        "yarn": ("factor", "original_len", "slow", "fast"),
    }[rotary.scaling]
    fields = {name: getattr(rotary, name) for name in ("base", "scaling", "magnitude", *used)}
    return Rotary(**fields, width=None if rotary.width == head else rotary.width)


def _shortest(layers: tuple[Any, ...]) -> Any:
    """Return the shortest pattern that repeats to these layers; what is the same in all of them, alone."""
    for length in range(1, len(layers) + 1):
        if all(layer == layers[i % length] for i, layer in enumerate(layers)):
            return layers[0] if length == 1 else layers[:length]
    raise AssertionError("every sequence repeats itself")

"""Qwen 2 and 2.5 (Yang et al. 2024): LLaMA with biases on q, k and v, and windows in the upper layers."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import Fields, flag
from jaxformer.convert.llama import FIXED, KEYS, NAMES, read_rope, write_rope
from jaxformer.convert.rope import FULL, read_layers, windows, write_layers


def read(source: Mapping[str, Any], fields: Fields) -> Fields:
    """Return windows and rotary positions."""
    has_window, layers = flag("use_sliding_window", default=False).get(source), fields["num_layers"]
    first = source.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise ValueError(f"max_window_layers={first!r} must be the number of a layer")
    sliding = read_layers(source, layers, [has_window and i >= first for i in range(layers)])
    if any(sliding) and not has_window:
        raise ValueError("layer_types names layers with a window, but use_sliding_window is false")
    return {"window": windows(source, sliding)} | read_rope(source, fields)


def write(config: Config) -> Fields:
    """Return the keys of windows and rotary positions."""
    said = write_layers(config)
    first = next((i for i, kind in enumerate(said["layer_types"]) if kind != FULL), config.num_layers)
    has_window = said["sliding_window"] is not None
    return said | {"use_sliding_window": has_window, "max_window_layers": first} | write_rope(config)


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    NAMES,
    keys={name: key for name, key in KEYS.items() if name != "d_head"},
    fixed=FIXED | {"qkv_bias": True},
    read=read,
    write=write,
)

"""Gemma 3, the text model (Gemma Team 2025): Gemma 2 with norms on heads, and two kinds of rotary positions."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.gemma2 import FIXED, KEYS, NAMES, ONLY
from jaxformer.convert.keys import Fields, number, size
from jaxformer.convert.llama import whole_heads
from jaxformer.convert.rope import FULL, SLIDING, read_layers, rope_object, windows, write_layers, write_scaling
from jaxformer.rotary import Rotary

LOCAL_BASE, GLOBAL_BASE = 10_000.0, 1_000_000.0


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    layers = fields["num_layers"]
    period = size("sliding_window_pattern", "_sliding_window_pattern", default=6).get(source)
    sliding = read_layers(source, layers, [(i + 1) % period != 0 for i in range(layers)])
    # In the old spelling "rope_scaling" is of the layers without a window alone.
    local = rope_object({"rope_parameters": source.get("rope_parameters")}, SLIDING)
    rotaries = {
        True: whole_heads(source, local, fields, number("rope_local_base_freq", default=LOCAL_BASE)),
        False: whole_heads(source, rope_object(source, FULL), fields, number("rope_theta", default=GLOBAL_BASE)),
    }
    return {"window": windows(source, sliding), "rotary": tuple(rotaries[slides] for slides in sliding)}


def _write(config: Config) -> Fields:
    found: dict[bool, set[Rotary]] = {True: set(), False: set()}
    for window, rotary in zip(config.windows, config.rotaries, strict=True):
        found[window is not None].add(rotary)
    if max(map(len, found.values())) > 1:
        raise ValueError("rotary positions differ between layers of one kind")
    local = next(iter(found[True]), Rotary(base=LOCAL_BASE))
    rotary = next(iter(found[False]), Rotary(base=GLOBAL_BASE))
    return write_layers(config) | {
        "rope_local_base_freq": local.base,
        "rope_theta": rotary.base,
        "rope_scaling": write_scaling(rotary),
    }


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    NAMES,
    keys=KEYS,
    fixed=FIXED | {"qk_norm": True},
    only=ONLY,
    read=_read,
    write=_write,
)

"""Mistral 7B (Jiang et al. 2023): LLaMA with a window."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import Fields, size
from jaxformer.convert.llama import FIXED, KEYS, NAMES, read_rope, write_rope


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    if "sliding_window" not in source:
        raise ValueError("config.json lacks 'sliding_window'; set it to null for a model without a window")
    return {"window": size("sliding_window", default=None).get(source)} | read_rope(source, fields)


def _write(config: Config) -> Fields:
    return {"sliding_window": config.windows[0]} | write_rope(config)


FAMILY = Family("mistral", "MistralForCausalLM", NAMES, keys=KEYS, fixed=FIXED, read=_read, write=_write)

"""Every family of published models that can be read and written, by its name in config.json."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert import (
    albert,
    bart,
    bert,
    bloom,
    distilbert,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    marian,
    mbart,
    mistral,
    mpt,
    opt,
    phi,
    qwen2,
    qwen3,
    roberta,
    t5,
)
from jaxformer.convert.family import Family

_MODULES = (
    gpt2,
    llama,
    mistral,
    qwen2,
    qwen3,
    gemma2,
    gemma3,
    gpt_neox,
    gptj,
    phi,
    opt,
    bloom,
    mpt,
    t5,
    bart,
    mbart,
    marian,
    bert,
    roberta,
    distilbert,
    albert,
)

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""Name in config.json -> family; where several can be a config, the first one is written."""


def family_of(source: Mapping[str, Any]) -> Family:
    """Return the family that the content of a config.json names.

    Raises:
      ValueError: it names none, or one that is not here.
    """
    name = source.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type={name!r} is not supported; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(config: Config, name: str | None = None) -> Family:
    """Return the family whose config.json says this config exactly.

    Args:
      name: the family; None: the first that can.

    Raises:
      ValueError: the family cannot, or none can, and what each lacks.
    """
    candidates = FAMILIES.values() if name is None else [family_of({"model_type": name})]
    reasons = {}
    for family in candidates:
        differences = family.differences(config)
        if not differences:
            return family
        reasons[family.model_type] = ", ".join(differences)
    why = "; ".join(f"{family}: {reason}" for family, reason in reasons.items())
    raise ValueError(f"the config cannot be said exactly in config.json. What models of a family cannot be: {why}")

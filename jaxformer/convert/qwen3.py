"""Qwen 3 (Yang et al. 2025): LLaMA with norms on the heads of q and k."""

from jaxformer.convert.family import Family
from jaxformer.convert.keys import size
from jaxformer.convert.llama import FIXED, KEYS, NAMES
from jaxformer.convert.qwen2 import read, write

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    NAMES,
    keys=KEYS | {"d_head": size("head_dim")},
    fixed=FIXED | {"qk_norm": True},
    only={"attention_bias": False},
    read=read,
    write=write,
)

"""MPT (MosaicML 2023): ALiBi, no bias anywhere, q, k and v in thirds of one tensor."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, check_refused, flag, number, rate, size
from jaxformer.convert.names import LAYER, QKV, Names, Rule, fused, norm, projection

FILE = "transformer.blocks.{i}"

NAMES = Names(
    (
        Rule("transformer.wte.weight", "embed/token/embedding", "V D"),
        *norm(f"{FILE}.norm_1", f"{LAYER}/attn_norm"),
        *fused(f"{FILE}.attn.Wqkv", QKV, "(M N H) D -> M D N H", "(M N H) -> M N H"),
        *projection(f"{FILE}.attn.out_proj", f"{LAYER}/attn/o_proj", "D (N H) -> N H D", "D"),
        *norm(f"{FILE}.norm_2", f"{LAYER}/mlp_norm"),
        *projection(f"{FILE}.ffn.up_proj", f"{LAYER}/mlp/up_proj", "F D -> D F", "F"),
        *projection(f"{FILE}.ffn.down_proj", f"{LAYER}/mlp/down_proj", "D F -> F D", "D"),
        *norm("transformer.norm_f", "decoder/final_norm"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
    ),
    prefix="transformer.",
)


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    attention = source.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise ValueError(f"attn_config={attention!r} must be an object")
    check_refused(attention, {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "prefix_lm": False, "qk_ln": False})
    return {"attention_scale": number("softmax_scale", default=None).get(attention)}


def _write(config: Config) -> Fields:
    return {"attn_config": {"alibi": True, "alibi_bias_max": 8, "softmax_scale": config.attention_scale}}


FAMILY = Family(
    "mpt",
    "MptForCausalLM",
    NAMES,
    # The feed-forward layer is four times as wide as the model, whatever "expansion_ratio" says.
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("max_seq_len"),
        "d_model": size("d_model"),
        "num_layers": size("n_layers", most=MOST_LAYERS),
        "num_heads": size("n_heads"),
        "norm_eps": number("layer_norm_epsilon", default=1e-5),
        "dropout": rate("resid_pdrop"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed={"residual": "pre", "norm": "layernorm", "positions": "alibi", "bias": False, "activation": "gelu"},
    only={"no_bias": True, "logit_scale": None},
    read=_read,
    write=_write,
)

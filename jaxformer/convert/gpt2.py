"""GPT-2 (Radford et al. 2019): its linear maps are stored [in, out], q, k and v in one."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, activation, flag, number, rate, size
from jaxformer.convert.names import LAYER, QKV, Names, Rule, fused, norm, projection

NAMES = Names(
    (
        Rule("transformer.wte.weight", "embed/token/embedding", "V D"),
        Rule("transformer.wpe.weight", "embed/position/embedding", "P D"),
        *norm("transformer.h.{i}.ln_1", f"{LAYER}/attn_norm"),
        *fused("transformer.h.{i}.attn.c_attn", QKV, "D (M N H) -> M D N H", "(M N H) -> M N H"),
        *projection("transformer.h.{i}.attn.c_proj", f"{LAYER}/attn/o_proj", "(N H) D -> N H D", "D"),
        *norm("transformer.h.{i}.ln_2", f"{LAYER}/mlp_norm"),
        *projection("transformer.h.{i}.mlp.c_fc", f"{LAYER}/mlp/up_proj", "D F", "F"),
        *projection("transformer.h.{i}.mlp.c_proj", f"{LAYER}/mlp/down_proj", "F D", "D"),
        *norm("transformer.ln_f", "decoder/final_norm"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
    ),
    prefix="transformer.",
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
)


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    scaled = flag("scale_attn_weights", default=True).get(source)
    return {"attention_scale": None if scaled else 1.0}


def _write(config: Config) -> Fields:
    return {
        "embd_pdrop": config.dropout,
        "scale_attn_weights": config.scale == config.sizes["H"] ** -0.5,
    }


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("n_positions"),
        "d_model": size("n_embd"),
        "num_layers": size("n_layer", most=MOST_LAYERS),
        "num_heads": size("n_head"),
        "d_ff": size("n_inner", default=None),
        "norm_eps": number("layer_norm_epsilon"),
        "activation": activation("activation_function"),
        "dropout": rate("resid_pdrop"),
        "attention_dropout": rate("attn_pdrop"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed={"residual": "pre", "norm": "layernorm", "positions": "learned"},
    only={"scale_attn_by_inverse_layer_idx": False},
    read=_read,
    write=_write,
)

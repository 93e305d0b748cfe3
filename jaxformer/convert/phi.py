"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023; Li et al. 2023): one norm before both sublayers, some lanes turn."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, activation, flag, number, rate, size
from jaxformer.convert.names import LAYER, Names, Rule, norm, projection
from jaxformer.convert.rope import head_width, read_rotary, rope_object, same_rotary, write_scaling, write_share

FILE = "model.layers.{i}"

NAMES = Names(
    (
        Rule("model.embed_tokens.weight", "embed/token/embedding", "V D"),
        *norm(f"{FILE}.input_layernorm", f"{LAYER}/attn_norm"),
        *norm(f"{FILE}.input_layernorm", f"{LAYER}/mlp_norm"),
        *projection(f"{FILE}.self_attn.q_proj", f"{LAYER}/attn/q_proj", "(N H) D -> D N H", "(N H) -> N H"),
        *projection(f"{FILE}.self_attn.k_proj", f"{LAYER}/attn/k_proj", "(K H) D -> D K H", "(K H) -> K H"),
        *projection(f"{FILE}.self_attn.v_proj", f"{LAYER}/attn/v_proj", "(K H) D -> D K H", "(K H) -> K H"),
        *projection(f"{FILE}.self_attn.dense", f"{LAYER}/attn/o_proj", "D (N H) -> N H D", "D"),
        *projection(f"{FILE}.mlp.fc1", f"{LAYER}/mlp/up_proj", "F D -> D F", "F"),
        *projection(f"{FILE}.mlp.fc2", f"{LAYER}/mlp/down_proj", "D F -> F D", "D"),
        *norm("model.final_layernorm", "decoder/final_norm"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
        Rule("lm_head.bias", "lm_head/bias", "V"),
    ),
    prefix="model.",
    buffers=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    theta, part = number("rope_theta", default=10000.0), number("partial_rotary_factor", default=0.5)
    found = rope_object(source)
    return {"rotary": read_rotary(source, found, head_width(fields), theta, part, fields["max_len"])}


def _write(config: Config) -> Fields:
    rotary = same_rotary(config)
    return {
        "embd_pdrop": config.dropout,
        "rope_theta": rotary.base,
        "rope_scaling": write_scaling(rotary),
        "partial_rotary_factor": write_share(rotary, config.sizes["H"]),
    }


FAMILY = Family(
    "phi",
    "PhiForCausalLM",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("max_position_embeddings"),
        "d_model": size("hidden_size"),
        "num_layers": size("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": size("num_attention_heads"),
        "num_kv_heads": size("num_key_value_heads", default=None),
        "d_ff": size("intermediate_size"),
        "norm_eps": number("layer_norm_eps"),
        "activation": activation("hidden_act"),
        "dropout": rate("resid_pdrop"),
        "attention_dropout": rate("attention_dropout"),
        "tie_embeddings": flag("tie_word_embeddings", default=False),
    },
    fixed={"residual": "parallel", "norm": "layernorm", "positions": "rotary", "head_bias": True},
    only={"qk_layernorm": False},
    read=_read,
    write=_write,
)

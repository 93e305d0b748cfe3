"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): q, k, v in one, head by head; some lanes turn."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, activation, flag, number, rate, size
from jaxformer.convert.names import LAYER, QKV, Names, Rule, fused, norm, projection
from jaxformer.convert.rope import head_width, read_rotary, rope_object, same_rotary, write_scaling, write_share

FILE = "gpt_neox.layers.{i}"

NAMES = Names(
    (
        Rule("gpt_neox.embed_in.weight", "embed/token/embedding", "V D"),
        *norm(f"{FILE}.input_layernorm", f"{LAYER}/attn_norm"),
        *norm(f"{FILE}.post_attention_layernorm", f"{LAYER}/mlp_norm"),
        *fused(f"{FILE}.attention.query_key_value", QKV, "(N M H) D -> M D N H", "(N M H) -> M N H"),
        *projection(f"{FILE}.attention.dense", f"{LAYER}/attn/o_proj", "D (N H) -> N H D", "D"),
        *projection(f"{FILE}.mlp.dense_h_to_4h", f"{LAYER}/mlp/up_proj", "F D -> D F", "F"),
        *projection(f"{FILE}.mlp.dense_4h_to_h", f"{LAYER}/mlp/down_proj", "D F -> F D", "D"),
        *norm("gpt_neox.final_layer_norm", "decoder/final_norm"),
        Rule("embed_out.weight", "lm_head/kernel", "V D -> D V"),
    ),
    prefix="gpt_neox.",
    buffers=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq",
)


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    theta, part = number("rotary_emb_base", default=10000.0), number("rotary_pct", default=0.25)
    rotary = read_rotary(source, rope_object(source), head_width(fields), theta, part, fields["max_len"])
    parallel = flag("use_parallel_residual", default=True).get(source)
    return {"rotary": rotary, "residual": "parallel" if parallel else "pre"}


def _write(config: Config) -> Fields:
    rotary = same_rotary(config)
    return {
        "rotary_emb_base": rotary.base,
        "rotary_pct": write_share(rotary, config.sizes["H"]),
        "rope_scaling": write_scaling(rotary),
        "use_parallel_residual": config.residual == "parallel",
    }


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("max_position_embeddings"),
        "d_model": size("hidden_size"),
        "num_layers": size("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": size("num_attention_heads"),
        "d_ff": size("intermediate_size"),
        "norm_eps": number("layer_norm_eps"),
        "activation": activation("hidden_act"),
        "dropout": rate("hidden_dropout"),
        "attention_dropout": rate("attention_dropout"),
        "tie_embeddings": flag("tie_word_embeddings", default=False),
    },
    fixed={"norm": "layernorm", "positions": "rotary"},
    only={"attention_bias": True},
    read=_read,
    write=_write,
)

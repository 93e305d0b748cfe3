"""LLaMA (Touvron et al. 2023; Grattafiori et al. 2024), and what its relatives share with it."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, Key, activation, flag, number, rate, size
from jaxformer.convert.names import LAYER, Change, Names, Rule, norm, projection
from jaxformer.convert.rope import head_width, read_rotary, rope_object, same_rotary, write_scaling
from jaxformer.rotary import Rotary

BUFFERS = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


def attention(file: str = "model.layers.{i}.self_attn", change: Change | None = None) -> tuple[Rule, ...]:
    """Return the rules of q, k, v and o as tensors of their own, and of the norms of heads where there are any."""
    attn = f"{LAYER}/attn"
    return (
        *projection(f"{file}.q_proj", f"{attn}/q_proj", "(N H) D -> D N H", "(N H) -> N H"),
        *projection(f"{file}.k_proj", f"{attn}/k_proj", "(K H) D -> D K H", "(K H) -> K H"),
        *projection(f"{file}.v_proj", f"{attn}/v_proj", "(K H) D -> D K H", "(K H) -> K H"),
        *projection(f"{file}.o_proj", f"{attn}/o_proj", "D (N H) -> N H D", "D"),
        *norm(f"{file}.q_norm", f"{attn}/q_norm", "H", change),
        *norm(f"{file}.k_norm", f"{attn}/k_norm", "H", change),
    )


def gated_mlp(file: str = "model.layers.{i}.mlp") -> tuple[Rule, ...]:
    """Return the rules of a gated feed-forward layer."""
    mlp = f"{LAYER}/mlp"
    return (
        *projection(f"{file}.gate_proj", f"{mlp}/gate_proj", "F D -> D F", "F"),
        *projection(f"{file}.up_proj", f"{mlp}/up_proj", "F D -> D F", "F"),
        *projection(f"{file}.down_proj", f"{mlp}/down_proj", "D F -> F D", "D"),
    )


NAMES = Names(
    (
        Rule("model.embed_tokens.weight", "embed/token/embedding", "V D"),
        *norm("model.layers.{i}.input_layernorm", f"{LAYER}/attn_norm"),
        *attention(),
        *norm("model.layers.{i}.post_attention_layernorm", f"{LAYER}/mlp_norm"),
        *gated_mlp(),
        *norm("model.norm", "decoder/final_norm"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
    ),
    prefix="model.",
    buffers=BUFFERS,
)

KEYS: dict[str, Key] = {
    "vocab_size": size("vocab_size"),
    "max_len": size("max_position_embeddings"),
    "d_model": size("hidden_size"),
    "num_layers": size("num_hidden_layers", most=MOST_LAYERS),
    "num_heads": size("num_attention_heads"),
    "num_kv_heads": size("num_key_value_heads"),
    "d_head": size("head_dim", default=None),
    "d_ff": size("intermediate_size"),
    "norm_eps": number("rms_norm_eps"),
    "activation": activation("hidden_act"),
    "attention_dropout": rate("attention_dropout"),
    "tie_embeddings": flag("tie_word_embeddings", default=False),
}
FIXED: Fields = {"residual": "pre", "norm": "rmsnorm", "positions": "rotary", "gated": True, "bias": False}


def whole_heads(source: Mapping[str, Any], found: Mapping[str, Any], fields: Fields, theta: Key) -> Rotary:
    """Return rotary positions that turn all lanes of a head.

    Raises:
      ValueError: config.json says that only some lanes turn, or see `rope.read_rotary`.
    """
    part = number("partial_rotary_factor", default=1.0)
    rotary = read_rotary(source, found, head_width(fields), theta, part, fields["max_len"])
    if rotary.width is not None:
        raise ValueError("partial_rotary_factor is not 1, but heads of this family turn as a whole")
    return rotary


def read_rope(source: Mapping[str, Any], fields: Fields) -> Fields:
    """Return the field `rotary`, the same for all layers."""
    return {"rotary": whole_heads(source, rope_object(source), fields, number("rope_theta", default=10000.0))}


def write_rope(config: Config) -> Fields:
    """Return the keys of rotary positions, which are the same for all layers."""
    rotary = same_rotary(config)
    return {"rope_theta": rotary.base, "rope_scaling": write_scaling(rotary)}


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    attention_bias, mlp_bias = (flag(name, default=False).get(source) for name in ("attention_bias", "mlp_bias"))
    if attention_bias != mlp_bias:
        raise ValueError(
            f"{attention_bias=} and {mlp_bias=}: biases in attention or feed-forward alone are not supported"
        )
    return {"bias": attention_bias} | read_rope(source, fields)


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    NAMES,
    keys=KEYS | {"num_kv_heads": size("num_key_value_heads", default=None)},
    fixed=FIXED,
    read=_read,
    write=lambda config: {"attention_bias": config.bias, "mlp_bias": config.bias} | write_rope(config),
)

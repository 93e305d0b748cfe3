"""T5 (Raffel et al. 2020): scores without a scale, and one table of distances a stack, which stands in block 0.

Version 1.0 has ReLU and a head that is the embedding times d_model^-0.5; version 1.1 has gated layers and a head of its
own (Shazeer 2020, "GLU variants improve Transformer").
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import ACTIVATIONS, MOST_LAYERS, Fields, flag, number, rate, size
from jaxformer.convert.names import ENCODER_LAYER, LAYER, Names, Rule


def _attention(file: str, params: str) -> Iterator[Rule]:
    for name in "qkv":
        yield Rule(f"{file}.{name}.weight", f"{params}/{name}_proj/kernel", "(N H) D -> D N H")
    yield Rule(f"{file}.o.weight", f"{params}/o_proj/kernel", "D (N H) -> N H D")


def _feed_forward(file: str, params: str) -> Iterator[Rule]:
    yield Rule(f"{file}.wi.weight", f"{params}/up_proj/kernel", "F D -> D F", when=lambda config: not config.gated)
    yield Rule(f"{file}.wi_0.weight", f"{params}/gate_proj/kernel", "F D -> D F")
    yield Rule(f"{file}.wi_1.weight", f"{params}/up_proj/kernel", "F D -> D F", when=lambda config: config.gated)
    yield Rule(f"{file}.wo.weight", f"{params}/down_proj/kernel", "D F -> F D")


def _stack(stack: str, params: str, sublayers: tuple[str, ...]) -> Iterator[Rule]:
    first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Rule(first, f"{stack}/relative_bias/embedding", "R N")
    for i, name in enumerate(sublayers):
        file = f"{stack}.block.{{i}}.layer.{i}"
        yield Rule(f"{file}.layer_norm.weight", f"{params}/{name}_norm/scale", "D")
        if name == "mlp":
            yield from _feed_forward(f"{file}.DenseReluDense", f"{params}/mlp")
        else:
            kind = "SelfAttention" if name == "attn" else "EncDecAttention"
            yield from _attention(f"{file}.{kind}", f"{params}/{name}")
    yield Rule(f"{stack}.final_layer_norm.weight", f"{stack}/final_norm/scale", "D")


NAMES = Names(
    (
        Rule("shared.weight", "embed/token/embedding", "V D"),
        *_stack("encoder", ENCODER_LAYER, ("attn", "mlp")),
        *_stack("decoder", LAYER, ("attn", "cross", "mlp")),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
    ),
    # The first files have a table of the cross-attention, which nothing reads.
    buffers=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    embeddings=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
_GATED = "gated-"
_TANH = "gated-gelu"
"""The one name that means another function than it says, the approximation by tanh."""


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    said = source.get("feed_forward_proj", "relu")
    name = said.removeprefix(_GATED) if isinstance(said, str) else None
    if name not in ACTIVATIONS:
        raise ValueError(f"feed_forward_proj={said!r} is not one of {sorted(ACTIVATIONS)}, alone or after 'gated-'")
    tied = flag("tie_word_embeddings", default=True).get(source)
    # Where a file says whether logits are scaled, it says of every head that it is tied.
    tied = flag("scale_decoder_outputs", default=tied).get(source)
    return {
        "activation": "gelu_tanh" if said == _TANH else ACTIVATIONS[name],
        "gated": said.startswith(_GATED),
        "tie_embeddings": tied,
        "logit_scale": fields["d_model"] ** -0.5 if tied else None,
        "attention_dropout": fields["dropout"],
    }


def _write(config: Config) -> Fields:
    name = next(name for name, field in ACTIVATIONS.items() if field == config.activation)
    plain = "gelu_new" if config.activation == "gelu_tanh" else name
    return {
        "feed_forward_proj": (_TANH if plain == "gelu_new" else _GATED + plain) if config.gated else plain,
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.tie_embeddings,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }


FAMILY = Family(
    "t5",
    "T5ForConditionalGeneration",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("n_positions", default=512),
        "d_model": size("d_model"),
        "num_layers": size("num_layers", most=MOST_LAYERS),
        "num_decoder_layers": size("num_decoder_layers", default=None, most=MOST_LAYERS),
        "num_heads": size("num_heads"),
        "d_head": size("d_kv"),
        "d_ff": size("d_ff"),
        "relative_buckets": size("relative_attention_num_buckets", default=32, most=1024),
        "relative_reach": size("relative_attention_max_distance", default=128, most=65536),
        "norm_eps": number("layer_norm_epsilon", default=1e-6),
        "dropout": rate("dropout_rate"),
    },
    fixed={
        "architecture": "encoder_decoder",
        "residual": "pre",
        "norm": "rmsnorm",
        "positions": "relative",
        "bias": False,
        "attention_scale": 1.0,
    },
    only={"is_encoder_decoder": True},
    read=_read,
    write=_write,
)

"""ALBERT (Lan et al. 2020): BERT with layers that share parameters, and embeddings narrower than the stream."""

from collections.abc import Iterator

from jaxformer.convert import bert
from jaxformer.convert.family import Family
from jaxformer.convert.keys import size
from jaxformer.convert.names import ENCODER_LAYER, Names, Rule, norm, projection

LAYER = "albert.encoder.albert_layer_groups.{i}.albert_layers.0"


def _layers() -> Iterator[Rule]:
    for theirs, ours in {"query": "q", "key": "k", "value": "v"}.items():
        at = f"{ENCODER_LAYER}/attn/{ours}_proj"
        yield from projection(f"{LAYER}.attention.{theirs}", at, "(N H) D -> D N H", "(N H) -> N H")
    yield from projection(f"{LAYER}.attention.dense", f"{ENCODER_LAYER}/attn/o_proj", "D (N H) -> N H D", "D")
    yield from norm(f"{LAYER}.attention.LayerNorm", f"{ENCODER_LAYER}/attn_norm")
    yield from projection(f"{LAYER}.ffn", f"{ENCODER_LAYER}/mlp/up_proj", "F D -> D F", "F")
    yield from projection(f"{LAYER}.ffn_output", f"{ENCODER_LAYER}/mlp/down_proj", "D F -> F D", "D")
    yield from norm(f"{LAYER}.full_layer_layer_norm", f"{ENCODER_LAYER}/mlp_norm")


NAMES = Names(
    (
        *bert.embeddings("albert", "E"),
        *projection("albert.encoder.embedding_hidden_mapping_in", "embed/proj", "D E -> E D", "D"),
        *_layers(),
        *projection("albert.pooler", "pooler/pooler_proj", "O D -> D O", "O"),
        *projection("albert.pooler", "classifier/pooler/pooler_proj", "O D -> D O", "O"),
        *bert.TOKEN_CLASSES,
        *projection("predictions.dense", "lm_head/transform_proj", "E D -> D E", "E"),
        *norm("predictions.LayerNorm", "lm_head/transform_norm", "E"),
        Rule("predictions.decoder.weight", "lm_head/kernel", "V E -> E V"),
        Rule("predictions.bias", "lm_head/bias", "V"),
    ),
    prefix="albert.",
    # Besides the buffer: what belongs to a head other than the one that is asked for, and a second name of a bias.
    buffers=r"embeddings\.position_ids|pooler\.\w+|predictions\.(?!decoder\.weight).*|sop_classifier\..*|classifier\.\w+",
    old_endings=bert.OLD_ENDINGS,
)

FAMILY = Family(
    "albert",
    "AlbertForMaskedLM",
    NAMES,
    keys=bert.KEYS
    | {
        "max_len": size("max_position_embeddings"),
        "d_embed": size("embedding_size", default=128),
        "num_distinct_layers": size("num_hidden_groups", default=1),
    },
    fixed=bert.FIXED,
    only=bert.ONLY | {"inner_group_num": 1},
    read=bert.read,
    heads={
        "masked_lm": ("AlbertForMaskedLM", "AlbertForPreTraining"),
        "pooler": ("AlbertModel",),
        "classifier": ("AlbertForSequenceClassification",),
        "token_classifier": ("AlbertForTokenClassification",),
        "none": ("AlbertModel",),
    },
)

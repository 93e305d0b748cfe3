"""RoBERTa (Liu et al. 2019): BERT with positions from row 2 on, one type of token, and heads of other names."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert import bert
from jaxformer.convert.family import Family
from jaxformer.convert.keys import Fields, Key, size
from jaxformer.convert.names import Names, Rule, norm, projection
from jaxformer.convert.opt import FROM_ROW_2


def _classes(file: str, head: str) -> Iterator[Rule]:
    """Yield the rules of the matrix of classes, which has another name for texts than for tokens."""

    def when(config: Config) -> bool:
        return config.head == head

    for rule in projection(file, "classifier/label_proj", "Y D -> D Y", "Y"):
        yield dataclasses.replace(rule, when=when)


NAMES = Names(
    (
        *bert.encoder("roberta", FROM_ROW_2),
        *projection("roberta.pooler.dense", "pooler/pooler_proj", "O D -> D O", "O"),
        *projection("classifier.dense", "classifier/pooler/pooler_proj", "O D -> D O", "O"),
        *_classes("classifier.out_proj", "classifier"),
        *_classes("classifier", "token_classifier"),
        *projection("lm_head.dense", "lm_head/transform_proj", "E D -> D E", "E"),
        *norm("lm_head.layer_norm", "lm_head/transform_norm", "E"),
        Rule("lm_head.decoder.weight", "lm_head/kernel", "V E -> E V"),
        Rule("lm_head.bias", "lm_head/bias", "V"),
    ),
    prefix="roberta.",
    # Besides the buffer: what belongs to a head other than the one that is asked for, and a second name of a bias.
    buffers=r"embeddings\.position_ids|pooler\.dense\.\w+|lm_head\.(?!decoder\.weight).*|classifier\..*",
)


def _max_len() -> Key:
    """Return the key of the context, which counts the two rows of padding too."""
    rows = size("max_position_embeddings")

    def read(name: str, value: int) -> int:
        if rows.read(name, value) < 3:
            raise ValueError(f"{name}={value} must be at least 3: two rows are of padding")
        return value - 2

    return Key(rows.names, read, lambda max_len: max_len + 2)


def read(source: Mapping[str, Any], fields: Fields) -> Fields:
    """Refuse a head whose activation is not the layers', which the library never changes."""
    if fields["head"] == "masked_lm" and fields["activation"] != "gelu":
        raise ValueError(f"hidden_act={source['hidden_act']!r}: the head for masked tokens has gelu; load another head")
    return bert.read(source, fields)


FAMILY = Family(
    "roberta",
    "RobertaForMaskedLM",
    NAMES,
    keys=bert.KEYS | {"max_len": _max_len()},
    fixed=bert.FIXED,
    only=bert.ONLY | {"pad_token_id": 1},
    read=read,
    write=lambda config: {"pad_token_id": 1},
    heads={
        "masked_lm": ("RobertaForMaskedLM",),
        "pooler": ("RobertaModel",),
        "classifier": ("RobertaForSequenceClassification",),
        "token_classifier": ("RobertaForTokenClassification",),
        "none": ("RobertaModel",),
    },
)

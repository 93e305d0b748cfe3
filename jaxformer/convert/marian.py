"""Marian (Junczys-Dowmunt et al. 2018): BART without norms of the embeddings, sinusoids in halves for its positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert import bart
from jaxformer.convert.family import Family
from jaxformer.convert.keys import Fields, size

# Published files hold the table of sinusoids that the positions stand for.
NAMES = dataclasses.replace(bart.NAMES, buffers=r"(encoder|decoder)\.embed_positions\.weight")


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    rows = size("decoder_vocab_size", default=None).get(source) or fields["vocab_size"]
    if rows != fields["vocab_size"]:
        raise ValueError(
            f"decoder_vocab_size={rows} differs from vocab_size={fields['vocab_size']}; stacks with embeddings of "
            "their own are not supported"
        )
    return bart.read(source, fields)


def _write(config: Config) -> Fields:
    last = config.vocab_size - 1  # padding, with which target texts begin
    return bart.writes(pad_token_id=last, decoder_start_token_id=last)(config) | {
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": True,
    }


FAMILY = Family(
    "marian",
    "MarianMTModel",
    NAMES,
    keys=bart.KEYS,
    fixed=bart.FIXED | {"residual": "post", "positions": "sinusoidal_halves"},
    only={
        "is_encoder_decoder": True,
        "share_encoder_decoder_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "static_position_embeddings": True,
    },
    read=_read,
    write=_write,
)

"""The Transformer in JAX: pure functions and Flax modules, checked against a float64 oracle.

Modules that need a heavy library (`tokenizers`, `grain`, `orbax`) are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxformer import attention, heads, int8, losses, optim, sampling, schedules, sharding, trees
from jaxformer.beam import Beams, beam_search
from jaxformer.cache import cache_bytes, init_cache
from jaxformer.config import Config
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.generate import Generation, generate, stream
from jaxformer.masks import Mask
from jaxformer.models import Decoder, Encoder, build
from jaxformer.presets import PRESETS
from jaxformer.prompts import pad_prompts
from jaxformer.rotary import Rotary
from jaxformer.score import Score, score, score_long
from jaxformer.speculative import DraftModel, PromptLookUp, Speculation, speculate

if TYPE_CHECKING:
    from jaxformer import checkpoint, corpus, data, inspection, objectives, pretrained, tokenizers, train
    from jaxformer.inspection import Inspection, inspect
    from jaxformer.pretrained import Pretrained, load, save
    from jaxformer.train import TrainState, evaluate, fit, init_state, make_eval_step, make_train_step

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Beams",
    "Config",
    "Decoder",
    "DraftModel",
    "Encoder",
    "EncoderDecoder",
    "Generation",
    "Inspection",
    "Mask",
    "Pretrained",
    "PromptLookUp",
    "Rotary",
    "Score",
    "Speculation",
    "TrainState",
    "attention",
    "beam_search",
    "build",
    "cache_bytes",
    "checkpoint",
    "corpus",
    "data",
    "evaluate",
    "fit",
    "generate",
    "heads",
    "init_cache",
    "init_state",
    "inspect",
    "inspection",
    "int8",
    "load",
    "losses",
    "make_eval_step",
    "make_train_step",
    "objectives",
    "optim",
    "pad_prompts",
    "pretrained",
    "sampling",
    "save",
    "schedules",
    "score",
    "score_long",
    "sharding",
    "speculate",
    "stream",
    "tokenizers",
    "train",
    "trees",
]

_LAZY_MODULES = ("checkpoint", "corpus", "data", "inspection", "objectives", "pretrained", "tokenizers", "train")
_LAZY_NAMES = {
    "inspection": ("Inspection", "inspect"),
    "train": ("TrainState", "evaluate", "fit", "init_state", "make_eval_step", "make_train_step"),
    "pretrained": ("Pretrained", "load", "save"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"jaxformer.{name}")
    for module, names in _LAZY_NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxformer.{module}"), name)
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""The Transformer in JAX: pure functions and Flax modules, checked against a float64 oracle.

Modules that need a heavy library (`tokenizers`, `grain`, `orbax`) are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxformer import attention, heads, losses, optim, sampling, sharding, trees
from jaxformer.cache import init_cache
from jaxformer.config import Config
from jaxformer.generate import Generation, generate, stream
from jaxformer.masks import Mask
from jaxformer.models import Decoder, Encoder, EncoderDecoder, build
from jaxformer.presets import PRESETS
from jaxformer.rotary import Rotary

if TYPE_CHECKING:
    from jaxformer import checkpoint, corpus, data, tokenizers, train
    from jaxformer.train import TrainState, evaluate, fit, init_state, make_eval_step, make_train_step

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Config",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Generation",
    "Mask",
    "Rotary",
    "TrainState",
    "attention",
    "build",
    "checkpoint",
    "corpus",
    "data",
    "evaluate",
    "fit",
    "generate",
    "heads",
    "init_cache",
    "init_state",
    "losses",
    "make_eval_step",
    "make_train_step",
    "optim",
    "sampling",
    "sharding",
    "stream",
    "tokenizers",
    "train",
    "trees",
]

_LAZY_MODULES = ("checkpoint", "corpus", "data", "tokenizers", "train")
_FROM_TRAIN = ("TrainState", "evaluate", "fit", "init_state", "make_eval_step", "make_train_step")


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"jaxformer.{name}")
    if name in _FROM_TRAIN:
        return getattr(importlib.import_module("jaxformer.train"), name)
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

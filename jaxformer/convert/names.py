"""Tensors of a file as parameters and back, by one table that says both directions.

    Rule("h.{i}.mlp.c_fc.weight", "decoder/layers_{i}/mlp/up_proj/kernel", "D F")
    Rule("layers.{i}.self_attn.q_proj.weight", "decoder/layers_{i}/attn/q_proj/kernel", "(N H) D -> D N H")

The pattern is einops' own: read from left to right it makes the parameter, from right to left the tensor, and its
letters are those of `Config.sizes`, so that it also says what shape the tensor must have.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import einops
import numpy as np
from numpy.typing import NDArray

from jaxformer.config import Config

Array = NDArray[Any]

LAYER = "decoder/layers_{i}"
ENCODER_LAYER = "encoder/layers_{i}"
QKV = tuple(f"{LAYER}/attn/{name}_proj" for name in "qkv")


class Change(NamedTuple):
    """A pair of inverse functions of (array, config), for what a pattern cannot say; made on the parameter's side.

    Attributes:
      load: from the rearranged tensor to the parameter.
      save: back.
      extra_rows: how many rows the tensor has more than the parameter.
    """

    load: Callable[[Array, Config], Array]
    save: Callable[[Array, Config], Array]
    extra_rows: int = 0


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of the file and the parameter, or the parameters, that it holds.

    Two rules may name one tensor: its value then goes to both parameters, which must still be equal when it is written.

    Attributes:
      file: the tensor's name; {i} stands for the number of a layer.
      params: the parameter's path; several: they are stacked along M, the first axis of the pattern's right side.
      pattern: of einops; without an arrow the two sides are the same.
      change: what is done beyond the pattern.
      when: whether a config's model has the tensor, where another rule is for the same parameter.
    """

    file: str
    params: str | tuple[str, ...]
    pattern: str
    change: Change | None = None
    when: Callable[[Config], bool] = lambda config: True

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of all parameters."""
        return (self.params,) if isinstance(self.params, str) else self.params

    @cached_property
    def sides(self) -> tuple[str, str]:
        """The two sides of the pattern, the tensor's and the parameters'."""
        left, _, right = self.pattern.partition(" -> ")
        return left, right or left

    def shape(self, config: Config) -> tuple[int, ...]:
        """Return the shape that the tensor must have."""
        sizes = self._sizes(config)
        axes = re.findall(r"\(([^)]*)\)|(\w)", self.sides[0])
        rows, *rest = (prod(sizes[letter] for letter in (group or single).split()) for group, single in axes)
        return rows + (self.change.extra_rows if self.change else 0), *rest

    def load(self, tensor: Array, config: Config) -> list[Array]:
        """Return the parameters that a tensor of the right shape holds; views of it where that is possible."""
        array = self._rearrange(tensor, *self.sides, config)
        arrays = [array] if isinstance(self.params, str) else list(array)
        return [self.change.load(array, config) for array in arrays] if self.change else arrays

    def save(self, arrays: Sequence[Array], config: Config) -> Array:
        """Return the tensor that holds these parameters."""
        if self.change:
            arrays = [self.change.save(array, config) for array in arrays]
        array = arrays[0] if isinstance(self.params, str) else np.stack(arrays)
        return self._rearrange(array, *self.sides[::-1], config)

    def _sizes(self, config: Config) -> dict[str, int]:
        return side(self.paths[0], config).sizes | {"M": len(self.paths), "1": 1}

    def _rearrange(self, array: Array, start: str, end: str, config: Config) -> Array:
        split = "".join(re.findall(r"\(.*?\)", start))
        sizes = {letter: size for letter, size in self._sizes(config).items() if letter in split}
        return einops.rearrange(array, f"{start} -> {end}", **sizes)


def side(path: str, config: Config) -> Config:
    """Return the config that says the sizes of a parameter: the decoder's own, or the encoder's."""
    return config if path.startswith(("encoder/", "embed/")) else config.of_decoder


def projection(file: str, params: str, weight: str, bias: str) -> tuple[Rule, Rule]:
    """Return the rules of a linear map with weight and bias, whose patterns are given."""
    return Rule(f"{file}.weight", f"{params}/kernel", weight), Rule(f"{file}.bias", f"{params}/bias", bias)


def fused(file: str, params: Sequence[str], weight: str, bias: str) -> tuple[Rule, Rule]:
    """Return the rules of several linear maps in one tensor, along the axis M of the patterns."""
    kernels, biases = (tuple(f"{path}/{kind}" for path in params) for kind in ("kernel", "bias"))
    return Rule(f"{file}.weight", kernels, weight), Rule(f"{file}.bias", biases, bias)


def norm(file: str, params: str, letter: str = "D", change: Change | None = None) -> tuple[Rule, Rule]:
    """Return the rules of a norm over the axis of this letter."""
    return (
        Rule(f"{file}.weight", f"{params}/scale", letter, change),
        Rule(f"{file}.bias", f"{params}/bias", letter, change),
    )


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of a family of models.

    Rules of parameters that a config does not have (biases, an output head) count for nothing there.

    Attributes:
      rules: in the order in which tensors are written.
      prefix: what all names but the head's begin with; files of a model without its head leave it out.
      buffers: regular expression of names, without the prefix, that hold no weights and are ignored.
      zeros: paths of parameters that the files do not have, because they are 0.
      zeros_without_head: the same of files of a model without its head, which is one that is tied.
      embeddings: other names of the token embeddings; files have some of them besides the rule's, or instead.
      old_endings: how names end -> how they end in old files, which are read too.
    """

    rules: tuple[Rule, ...]
    prefix: str = ""
    buffers: str = ""
    zeros: tuple[str, ...] = ()
    zeros_without_head: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    old_endings: Mapping[str, str] = dataclasses.field(default_factory=dict)

"""The tensors of a file as the parameters of a model and back, by the family's table of names."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxformer.config import Config
from jaxformer.convert.names import Array, Names, Rule, side
from jaxformer.models import build
from jaxformer.trees import path_name, unstack_layers

FLOATS = tuple(np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
"""Types that weights may have."""
_HEAD = "lm_head/kernel"
_EMBEDDING = "embed/token/embedding"
_TARGET = "target_embed/token/embedding"


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a config's model by its path, in the layout of a loop over layers."""
    two = config.architecture == "encoder_decoder"
    # The layers of a stack have the same parameters.
    single: dict[str, Any] = {"num_layers": 1, "num_decoder_layers": 1 if two else None, "num_distinct_layers": None}
    one = dataclasses.replace(config, **single, scan_layers=False)
    ids = [jax.ShapeDtypeStruct((1, 1), jnp.int32)] * (1 + two)
    tree = jax.eval_shape(build(one).init, jax.random.key(0), *ids)["params"]
    found = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return {
        path.replace("layers_0", f"layers_{i}"): shape
        for path, shape in found.items()
        for i in range(side(path, config).num_blocks if "layers_0" in path else 1)
    }


class Match(NamedTuple):
    """How the tensors of a file and the parameters of a model belong together, by their names alone.

    Args:
      taken: for each tensor that the model needs, there or not: its name, its rule, and its parameters' paths.
      zeros: paths of parameters that are 0 and have no tensor.
      copies: names of tensors that must repeat another, and that other's.
      ignored: names of buffers, which hold no weights.
      unexpected: names that a model of the config has no place for.
    """

    taken: list[tuple[str, Rule, list[str]]]
    zeros: list[str]
    copies: dict[str, str]
    ignored: list[str]
    unexpected: list[str]


def match_names(names: Names, config: Config, found: Collection[str]) -> Match:
    """Find the place of each tensor of a file of which the names are given; files without a head may lack a prefix."""
    prefix = names.prefix if any(name.startswith(names.prefix) for name in found) else ""
    wanted, taken = shapes(config), []
    zeros = [path for path in _per_layer(names.zeros, config) if path in wanted]
    optional = () if prefix else names.zeros_without_head
    twins = {_EMBEDDING: _embeddings(names, config, prefix), _TARGET: _target_embeddings(names, config)}
    first = {path: next((name for name in group if name in found), group[0]) for path, group in twins.items() if group}
    for file, rule, paths in _entries(names, config, wanted):
        file = prefix + file.removeprefix(names.prefix) if file.startswith(names.prefix) else file
        file = first.get(paths[0]) or _old(file, names, found)
        if paths[0] in optional and file not in found:
            zeros += paths
        else:
            taken.append((file, rule, paths))
    left = sorted(set(found) - {file for file, *_ in taken})
    ignored = [name for name in left if re.fullmatch(names.buffers, name.removeprefix(prefix))]
    copies = {name: first[path] for path, group in twins.items() for name in group if name in {*left} - {*ignored}}
    unexpected = sorted(set(left) - {*ignored, *copies})
    return Match(taken, zeros, copies, ignored, unexpected)


def to_params(
    names: Names,
    config: Config,
    tensors: Mapping[str, Array],
    put: Callable[[str, Array], Any],
    numbers: int | None = None,
) -> dict[str, Any]:
    """Make the parameters of a model from the tensors of a file.

    Args:
      tensors: read one after the other; an array that maps its file is never copied as a whole.
      put: makes a leaf of a parameter's path and its values, which are views of a tensor.
      numbers: how many the tensors hold in all, where asking each for its size would read it. None: they are asked.

    Raises:
      ValueError: a tensor that is missing, that nobody asked for, that has another shape than the config says, that
        holds integers, NaN or infinity; or a head unlike the embedding where the config ties them.
    """
    check_sizes(config, len(tensors), sum(x.size for x in tensors.values()) if numbers is None else numbers)
    wanted, match, found = shapes(config), match_names(names, config, tensors), {}
    for file, rule, paths in match.taken:
        tensor = _checked(file, tensors, rule.shape(config))
        for path, array in zip(paths, rule.load(tensor, config), strict=True):
            found[path] = put(path, array)
    for path in match.zeros:
        found[path] = put(path, np.zeros(wanted[path], found[_EMBEDDING].dtype))
    for name, original in match.copies.items():
        _check_copy(name, tensors[name], tensors[original])
    if match.unexpected:
        raise ValueError(f"no model of this config has the tensors {_some(match.unexpected)}")
    return _nested({path: found[path] for path in wanted})


def to_tensors(names: Names, config: Config, params: Mapping[str, Any]) -> dict[str, Array]:
    """Make the tensors of a file from the parameters of a model; the inverse of `to_params`.

    Raises:
      ValueError: parameters that are not those of the config, or whose values the files of the family cannot hold.
    """
    if config.scan_layers:
        params = unstack_layers(params)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(dict(params))}
    wanted = shapes(config)
    for path in [*wanted, *leaves]:
        if path not in leaves:
            raise ValueError(f"the parameters lack {path}, which the config asks for")
        if path not in wanted:
            raise ValueError(f"the parameters hold {path}, which a model of the config does not have")
        if leaves[path].shape != wanted[path]:
            raise ValueError(f"{path} has shape {leaves[path].shape}, but the config makes it {wanted[path]}")
    tensors: dict[str, Array] = {}
    for file, rule, paths in _entries(names, config, wanted):
        tensor = rule.save([np.asarray(leaves[path]) for path in paths], config)
        if file in tensors and tensors[file].tobytes() != tensor.tobytes():
            raise ValueError(f"{paths[0]} is not what its twin is, but the file has one tensor {file!r} for both")
        tensors[file] = tensor
    for path in _per_layer(names.zeros, config):
        if path in wanted and np.any(np.asarray(leaves[path])):
            raise ValueError(f"{path} is not 0, but files of this family have no tensor for it")
    return tensors


def _per_layer(paths: Sequence[str], config: Config) -> Iterator[str]:
    for path in paths:
        for i in range(side(path, config).num_blocks if "{i}" in path else 1):
            yield path.replace("{i}", str(i))


def _entries(names: Names, config: Config, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Rule, list[str]]]:
    """Yield each tensor that the config asks for, its rule, and the paths of its parameters."""
    for rule in names.rules:
        for i in range(side(rule.paths[0], config).num_blocks if "{i}" in rule.file else 1):
            paths = [path.replace("{i}", str(i)) for path in rule.paths]
            if paths[0] in wanted and rule.when(config):
                yield rule.file.replace("{i}", str(i)), rule, paths


def check_sizes(config: Config, tensors: int, numbers: int) -> None:
    """Refuse sizes that no model of so many tensors and numbers has, before anything is made of them.

    Raises:
      ValueError: the size, and how much there is.
    """
    for stack in (config, config.of_decoder):
        for letter in "VDNHKF":
            if stack.sizes[letter] > numbers:
                raise ValueError(
                    f"the config says {letter}={stack.sizes[letter]}, but the file holds {numbers} numbers"
                )
        if stack.num_blocks > tensors:
            raise ValueError(f"the config says {stack.num_blocks} layers, but the file holds {tensors} tensors")


def _checked(name: str, tensors: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
    if name not in tensors:
        raise ValueError(f"tensor {name!r} of shape {shape} is missing; the file has {_some(tensors)}")
    tensor = tensors[name]
    if tensor.shape != shape:
        raise ValueError(f"tensor {name!r} has shape {tensor.shape}, but the config makes it {shape}")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"tensor {name!r} has type {tensor.dtype}; weights must be float64, 32, 16 or bfloat16")
    if not np.isfinite(tensor).all():
        raise ValueError(f"tensor {name!r} holds NaN or infinity; the file is damaged")
    return tensor


def _embeddings(names: Names, config: Config, prefix: str) -> list[str]:
    """Return all names that the token embeddings may have: the rule's, and that of a head that is tied to them."""
    files = {path: rule.file for rule in names.rules for path in rule.paths}
    tied = config.tie_embeddings and config.target_vocab_size is None
    head = [files[_HEAD]] if tied and _HEAD in files else []
    found = [files[_EMBEDDING], *names.embeddings, *head]
    return [prefix + name.removeprefix(names.prefix) if name.startswith(names.prefix) else name for name in found]


def _target_embeddings(names: Names, config: Config) -> list[str]:
    """Return the same of a decoder that has embeddings of its own: none, if it has not."""
    files = {path: rule.file for rule in names.rules for path in rule.paths}
    if config.target_vocab_size is None or _TARGET not in files:
        return []
    return [files[_TARGET]] + ([files[_HEAD]] if config.tie_embeddings and _HEAD in files else [])


def _old(file: str, names: Names, found: Collection[str]) -> str:
    """Return the name that a tensor has in a file that spells the ends of names as was once usual."""
    spelled = [file.removesuffix(new) + old for new, old in names.old_endings.items() if file.endswith(new)]
    return next((name for name in spelled if name in found and file not in found), file)


def _check_copy(name: str, copy: Array, embedding: Array) -> None:
    if copy.shape != embedding.shape or copy.dtype != embedding.dtype or (copy != embedding).any():
        raise ValueError(
            f"the config ties {name!r} to the embedding, but they differ; set tie_word_embeddings to false "
            "if the head is a matrix of its own"
        )


def _some(names: Collection[str]) -> str:
    few = list(names)[:5]
    return ", ".join(map(repr, few)) + (f" and {len(names) - len(few)} more" if len(names) > len(few) else "")


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = leaf
    return tree

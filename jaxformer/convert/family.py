"""What is known of a family of models: the keys of its config.json, the names of its tensors, and what they mean."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.keys import LABELLED, Fields, Key, check_refused, labels, num_labels, plain
from jaxformer.convert.names import Names

HOW_RUN = ("dtype", "param_dtype", "attention", "scan_layers")
"""Fields of a Config that say how a model is run; config.json says nothing of them."""
RATES = ("dropout", "attention_dropout")


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of published models, both ways.

    Attributes:
      model_type: its name in config.json.
      architecture: the class of its language models in `transformers`.
      names: the tensors.
      keys: fields of Config that stand in config.json under another name and mean the same.
      fixed: fields of Config that all models of the family have in common.
      only: keys of config.json with the one value that is understood; one that is not there has this value.
      read: more fields, from config.json and the fields so far.
      write: more keys of config.json, from a config.
      heads: name of a head -> the classes in `transformers` that have it, the first of which is written; empty: all
        models of the family have the head lm, and are of the class `architecture`.
    """

    model_type: str
    architecture: str
    names: Names
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any]
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Mapping[str, Any], Fields], Fields] = lambda source, fields: {}
    write: Callable[[Config], Fields] = lambda config: {}
    heads: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def config(self, source: Mapping[str, Any], head: str | None = None) -> Config:
        """Return the Config that the content of a config.json says.

        Args:
          head: instead of the one that the class in config.json has.

        Raises:
          ValueError: a key that is missing, of a wrong type or out of range, or that asks for what is not supported; a
            head that the family does not have.
        """
        check_refused(source, self.only)
        fields = {field: key.get(source) for field, key in self.keys.items()} | dict(self.fixed)
        fields["head"] = self._head(source, head)
        if fields["head"] in LABELLED:
            fields["num_labels"] = num_labels(source)
        return plain(Config(**fields | self.read(source, fields)))

    def _head(self, source: Mapping[str, Any], head: str | None) -> str:
        heads = self.heads or {"lm": (self.architecture,)}
        if head is not None:
            if head not in heads:
                raise ValueError(
                    f"head={head!r} is none that models of {self.model_type} have; choose of {list(heads)}"
                )
            return head
        if not self.heads:
            return "lm"
        said = source.get("architectures")
        for name, classes in heads.items():
            is_left_out = name == "pooler" and source.get("add_pooling_layer") is False
            if isinstance(said, list) and said and said[0] in classes and not is_left_out:
                return name
        raise ValueError(f"architectures={said!r} names no class that is known; give the head, one of {list(heads)}")

    def source(self, config: Config) -> Fields:
        """Return the content of a config.json that says this config; see `differences` for what it may not say.

        Raises:
          ValueError: something that the family has no words for.
        """
        sizes = config.sizes
        said = {"num_kv_heads": sizes["K"], "d_head": sizes["H"], "d_ff": sizes["F"], "attention_scale": config.scale}
        decoder = config.of_decoder
        said |= {"num_decoder_layers": decoder.num_layers, "decoder_d_ff": decoder.sizes["F"]}
        keys = {
            key.names[0]: key.write(said[field] if field in said else getattr(config, field))
            for field, key in self.keys.items()
        }
        # Which tokens begin and end a text is the tokenizer's matter; without null, classes put numbers of their own.
        ends = {"bos_token_id": None, "eos_token_id": None}
        if self.heads and config.head not in self.heads:
            raise ValueError(f"head={config.head!r}")
        named = self.heads[config.head][0] if self.heads else self.architecture
        keys |= {"architectures": [named], "model_type": self.model_type} | labels(config)
        if config.head == "none" and "pooler" in self.heads:  # one class has both
            keys["add_pooling_layer"] = False
        return keys | self.write(config) | ends

    def differences(self, config: Config) -> list[str]:
        """Return why models of the family cannot be this config: nothing, if they can be.

        Dropout that the family's config.json has no key for is no difference: it is no part of what the model computes.
        """
        try:
            expressed = self.config(self.source(config))
        except ValueError as error:
            return [str(error)]
        skipped = {*HOW_RUN, *(rate for rate in RATES if rate not in self.keys)}
        wanted = plain(config)
        return [
            f"{field.name}={getattr(wanted, field.name)!r}"
            for field in dataclasses.fields(Config)
            if field.name not in skipped and getattr(wanted, field.name) != getattr(expressed, field.name)
        ]

"""What is known of a family of models: the keys of its config.json, the names of its tensors, and what they mean."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.keys import Fields, Key, check_refused, plain
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
    """

    model_type: str
    architecture: str
    names: Names
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any]
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Mapping[str, Any], Fields], Fields] = lambda source, fields: {}
    write: Callable[[Config], Fields] = lambda config: {}

    def config(self, source: Mapping[str, Any]) -> Config:
        """Return the Config that the content of a config.json says.

        Raises:
          ValueError: a key that is missing, of a wrong type or out of range, or that asks for what is not supported.
        """
        check_refused(source, self.only)
        fields = {field: key.get(source) for field, key in self.keys.items()} | dict(self.fixed)
        return plain(Config(**fields | self.read(source, fields)))

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
        return {"architectures": [self.architecture], "model_type": self.model_type} | keys | self.write(config) | ends

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

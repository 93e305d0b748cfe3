"""Everything that chooses a model, as one frozen dataclass of strings and numbers.

No arrays and no behaviour live here: a `Config` is JSON in both directions, is hashable (so that it can be a static
argument of `jax.jit`), and is checked when it is made. Sizes change with `dataclasses.replace(PRESETS["gpt2"],
num_layers=24)`. The names that a field accepts are the `Literal` types below; each has one table elsewhere that gives
every name its meaning (a test holds the two together).
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxformer.checks import check_choice
from jaxformer.config_checks import check_arrangement, check_positions, check_types
from jaxformer.rotary import Rotary

Architecture = Literal["encoder", "decoder", "encoder_decoder"]
Head = Literal["lm", "masked_lm", "pooler", "classifier", "token_classifier", "none"]
Residual = Literal["pre", "post", "sandwich", "parallel"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["none", "learned", "sinusoidal", "sinusoidal_halves", "rotary", "alibi", "relative"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
DType = Literal["float32", "bfloat16"]

_CHOICES: dict[str, Any] = {
    "architecture": Architecture,
    "head": Head,
    "residual": Residual,
    "norm": Norm,
    "positions": Positions,
    "activation": Activation,
    "dtype": DType,
    "param_dtype": DType,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What the model is, and how it is run.

    Sizes that follow from others may stay None; `sizes` holds every size under its letter, with the defaults filled in.

    Raises:
      ValueError: a value that no model can have; the message names the value, the requirement and the remedy.
    """

    # What the model is.
    architecture: Architecture = "decoder"
    """The arrangement of stacks; encoder: one two-sided stack, decoder: one causal stack, encoder_decoder: both, the
    second with cross-attention to the first."""
    head: Head = "lm"
    """What a model returns: lm, logits of the vocabulary; masked_lm, the same after one more layer; pooler, a vector of
    the first token; classifier, logits of that; token_classifier, logits of each token; none, the hidden states."""
    num_labels: int | None = None
    """Number of classes of a classifier."""
    vocab_size: int
    """Number of token ids."""
    target_vocab_size: int | None = None
    """Token ids of a decoder that has embeddings of its own. None: it shares those of the encoder."""
    num_token_types: int | None = None
    """Rows of a table that tells parts of a text apart, such as a question from its passage. None: no table."""
    max_len: int
    """Context length in tokens: rows of a learned position table, and the most that `generate` will hold."""
    d_model: int
    """Width of the residual stream."""
    num_layers: int
    """Number of layers, of each stack."""
    num_distinct_layers: int | None = None
    """Number of layers with parameters of their own, of each stack; each serves as the same number of layers in a row
    (Lan et al. 2020, "ALBERT", section 3.1). None: all."""
    num_decoder_layers: int | None = None
    """Number of layers of the decoder beside an encoder. None: num_layers."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key/value heads, a divisor of num_heads (1: multi-query). None: num_heads."""
    d_head: int | None = None
    """Width of one head. None: d_model / num_heads."""
    d_ff: int | None = None
    """Width of the feed-forward layer. None: 4 * d_model."""
    decoder_d_ff: int | None = None
    """Width of the feed-forward layer of the decoder beside an encoder. None: d_ff."""
    d_embed: int | None = None
    """Width of the embeddings, where a projection follows them. None: d_model, without a projection."""
    residual: Residual = "pre"
    """How a sublayer f and its norm join the stream: pre, x + f(norm(x)); post, norm(x + f(x)); sandwich,
    x + norm'(f(norm(x))); parallel, x + attention(norm(x)) + feed-forward(norm'(x))."""
    embed_norm: bool = False
    """Normalise the embeddings, after positions are added."""
    final_norm: bool | None = None
    """Normalise the stream after the last block. None: unless residual is post, where it is normalised already."""
    norm: Norm = "layernorm"
    """layernorm takes the mean away and scales; rmsnorm only scales."""
    norm_eps: float = 1e-5
    """Added to the variance, or to the mean square."""
    positions: Positions = "rotary"
    """How tokens know their place: none; a learned table or sinusoids (a sine and its cosine by turns, or all sines in
    the first half) added to the embeddings; turned q and k; or a bias on the scores, by distance (alibi) or from a
    learned table of distances (relative)."""
    rotary: Rotary | tuple[Rotary, ...] = Rotary()
    """Rotary positions, of every layer or as a pattern that repeats over the layers."""
    relative_buckets: int = 32
    """Rows of the table of relative positions; even, and half of them for either side in an encoder."""
    relative_reach: int = 128
    """Distance from which on all share the last bucket of relative positions."""
    window: int | tuple[int | None, ...] | None = None
    """Number of tokens that a query sees back, itself included, and in an encoder as many ahead; of every layer or as a
    pattern that repeats over the layers (None: all tokens)."""
    qk_norm: bool = False
    """Normalise each head of q and of k, before they are turned."""
    softcap: float | None = None
    """Bound of the attention scores, softcap * tanh(scores / softcap). None: no bound."""
    activation: Activation = "gelu_tanh"
    """The nonlinearity of the feed-forward layer."""
    gated: bool = False
    """Multiply the activation by a second projection (GLU variants)."""
    bias: bool = True
    """Biases in projections and in layernorm."""
    qkv_bias: bool | None = None
    """Biases in the projections to q, k and v. None: as `bias`."""
    attention_scale: float | None = None
    """Factor on q . k before the softmax. None: d_head ** -0.5."""
    embed_scale: bool = False
    """Multiply token embeddings by sqrt(d_model)."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""
    head_bias: bool = False
    """A bias on the logits."""
    logit_scale: float | None = None
    """Factor on the logits, before their bias. None: 1."""
    logit_softcap: float | None = None
    """Bound of the logits, softcap * tanh(logits / softcap). None: no bound."""
    dropout: float = 0.0
    """Rate on embeddings and on each sublayer's output; active when a dropout key is passed."""
    attention_dropout: float = 0.0
    """Rate on the attention pattern; active when a dropout key is passed."""

    # How it is run.
    dtype: DType = "float32"
    """Type of activations and products. Norms, rotary angles, softmax, logits and loss are float32 always."""
    param_dtype: DType = "float32"
    """Type in which parameters are stored."""
    attention: str = "auto"
    """Key of `attention.IMPLEMENTATIONS`, or auto; auto on long rows has no forward-mode derivative, einsum has."""
    scan_layers: bool = False
    """Run the layers with one `nn.scan` over stacked parameters: program size constant in depth."""

    def __post_init__(self) -> None:
        check_types(self)
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), get_args(choices))
        if self.d_head is None and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of num_heads={self.num_heads}; set d_head explicitly"
            )
        sizes = self.sizes
        if self.num_heads % sizes["K"]:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each key/value head serves the same number of query heads"
            )
        check_positions(self)
        check_arrangement(self)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by letter; also P positions, A token types, R buckets, E embedding, O square projections, Y classes."""
        return {
            "V": self.vocab_size,
            "P": self.max_len,
            "D": self.d_model,
            "L": self.num_layers,
            "N": self.num_heads,
            "K": self.num_kv_heads or self.num_heads,
            "H": self.d_head or self.d_model // self.num_heads,
            "F": self.d_ff or 4 * self.d_model,
            "R": self.relative_buckets,
            "E": self.d_embed or self.d_model,
            "O": self.d_model,
            "Y": self.num_labels or 0,
            "A": self.num_token_types or 0,
        }

    @property
    def of_decoder(self) -> "Config":
        """The config whose layers and token ids are those of the decoder."""
        return dataclasses.replace(
            self,
            num_layers=self.num_decoder_layers or self.num_layers,
            d_ff=self.decoder_d_ff or self.d_ff,
            vocab_size=self.target_vocab_size or self.vocab_size,
            num_decoder_layers=None,
            decoder_d_ff=None,
            target_vocab_size=None,
        )

    @property
    def num_blocks(self) -> int:
        """The number of layers with parameters of their own: `num_distinct_layers`, or all."""
        return self.num_distinct_layers or self.num_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self._per_layer(self.window)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The rotary positions of each layer."""
        return self._per_layer(self.rotary)

    def _per_layer(self, pattern: Any) -> tuple[Any, ...]:
        pattern = pattern if isinstance(pattern, tuple) else (pattern,)
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    @property
    def scale(self) -> float:
        """The factor on q . k: `attention_scale`, or 1 / sqrt(H) (Vaswani et al. 2017, equation 1)."""
        return self.sizes["H"] ** -0.5 if self.attention_scale is None else self.attention_scale

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict of JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Config":
        """Makes a Config from untrusted JSON fields.

        Raises:
          ValueError: an unknown or missing field (named, with the closest valid name), or a value out of range.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; the fields are {sorted(known)}"
                raise ValueError(f"config field {name!r} is unknown{hint}")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise ValueError(f"config lacks {missing}; a model cannot be built without them")
        return cls(**{name: _from_json(name, value) for name, value in fields.items()})


def _from_json(name: str, value: Any) -> Any:
    """Makes tuples of lists, and a Rotary of its fields."""
    if isinstance(value, list | tuple):
        return tuple(_from_json(name, entry) for entry in value)
    return Rotary.from_dict(value) if name == "rotary" and isinstance(value, Mapping) else value

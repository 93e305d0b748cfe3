"""The text so far of every row, as transforms of logits read it: without padding, wherever the batch has it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["ids", "prompt_lengths", "lengths"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class History:
    """Prompt and new tokens.

    Attributes:
      ids: [B C] int32; column c is the token number c of the row's text, -1 beyond its end.
      prompt_lengths: [B] int32, tokens of the prompt.
      lengths: [B] int32, tokens of prompt and new text.
    """

    ids: Leaf
    prompt_lengths: Leaf
    lengths: Leaf

    @classmethod
    def of_prompt(cls, ids: Int[Array, "B P"], positions: Int[Array, "B P"], capacity: int) -> "History":
        """Returns the history of prompts in which position -1 is padding, with room for `capacity` tokens a row."""
        real = positions >= 0
        place = jnp.where(real, jnp.cumsum(real, axis=1) - 1, capacity)
        empty = jnp.full((ids.shape[0], capacity), -1, jnp.int32)
        lengths = real.sum(axis=1).astype(jnp.int32)
        return cls(empty.at[_rows(ids)[:, None], place].set(ids, mode="drop"), lengths, lengths)

    def append(self, token: Int[Array, " B"], done: Bool[Array, " B"]) -> "History":
        """Returns the history with one more token in each row that is not done."""
        place = jnp.where(done, self.ids.shape[1], self.lengths)
        ids = self.ids.at[_rows(token), place].set(token, mode="drop")
        return dataclasses.replace(self, ids=ids, lengths=self.lengths + ~done)

    def extend(self, tokens: Int[Array, "B T"], counts: Int[Array, " B"]) -> "History":
        """Returns the history with the first `counts` of these tokens in each row."""
        index = jnp.arange(tokens.shape[1])
        place = jnp.where(index < counts[:, None], self.lengths[:, None] + index, self.ids.shape[1])
        ids = self.ids.at[_rows(tokens)[:, None], place].set(tokens, mode="drop")
        return dataclasses.replace(self, ids=ids, lengths=self.lengths + counts)

    def newest(self) -> Int[Array, " B"]:
        """Returns the last token of each row; 0 where there is none."""
        last = jnp.maximum(self.lengths - 1, 0)[:, None]
        return jnp.maximum(jnp.take_along_axis(self.ids, last, axis=1)[:, 0], 0)

    def new_ids(self, new: int, pad_id: Int[Array, ""]) -> Int[Array, "B new"]:
        """Returns the first `new` tokens after the prompt, padded."""
        found = jnp.take_along_axis(self.ids, self.prompt_lengths[:, None] + jnp.arange(new), axis=1)
        return jnp.where(found < 0, pad_id, found)

    def counts(self, vocab_size: int, *, new_only: bool = False) -> Int[Array, "B V"]:
        """Returns how often each token stands in the text, or in its new part."""
        counted = self.ids >= 0
        if new_only:
            counted &= jnp.arange(self.ids.shape[1]) >= self.prompt_lengths[:, None]
        return (
            jnp.zeros((self.ids.shape[0], vocab_size), jnp.int32)
            .at[_rows(self.ids)[:, None], jnp.where(counted, self.ids, vocab_size)]
            .add(1, mode="drop")
        )

    def ends_with(self, tokens: Int[Array, "n m"]) -> Bool[Array, " B"]:
        """Returns whether the new text of a row ends with one of n runs of tokens, padded with -1 on the left."""
        m = tokens.shape[1]
        place = self.lengths[:, None] - m + jnp.arange(m)
        tail = jnp.take_along_axis(self.ids, jnp.maximum(place, 0), axis=1)
        tail = jnp.where(place >= self.prompt_lengths[:, None], tail, -2)
        return ((tail[:, None] == tokens) | (tokens < 0)).all(axis=2).any(axis=1)


def _rows(x: Array) -> Array:
    return jnp.arange(x.shape[0])

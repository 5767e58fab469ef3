"""A model's embedding and output layer, which heads share with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sequoia.model.lean.decoder import Recipe
from sequoia.model.lean.inputs import Embedding
from sequoia.model.lean.linear import PackedModule


class Ends:
    """Both of them.

    Args:
        model: transformers' own, or an outline of it where the recipe has all there is.
        recipe: of the lean decoder, where it runs.
    """

    def __init__(self, model: Any, recipe: Recipe | None) -> None:
        self._model, self._recipe = model, recipe

    def embed(self, tokens: Tensor) -> Tensor:
        """[rows] token ids → [rows, hidden]"""
        table = self._table
        if table is not None:
            return functional.embedding(tokens, table)
        embedded: Tensor = self._input_layer(tokens)
        return embedded

    def embeds_as(self, weight: Tensor) -> bool:
        """Whether the embedding is this one, [vocab, hidden], in the target's own number format."""
        table = self._table
        own = self._input_layer.weight if table is None else table
        return own.shape == weight.shape and torch.equal(own, weight.to(own))

    def head(self, rows: Tensor) -> Tensor:
        """[rows, hidden] that have been through the final norm → [rows, vocab] logits"""
        if self._recipe is not None:
            return self._recipe.head(rows)
        logits: Tensor = self._output_layer(rows)
        return logits

    def head_weight(self) -> Tensor:
        """[vocab, hidden] of the output layer, as far as quantising has left it."""
        if self._recipe is not None and not self._recipe.shares_head:
            return self._recipe.head.dense()
        if self._table is not None:
            return self._table
        module = self._output_layer if self._recipe is None else self._input_layer
        weight: Tensor = module.linear.dense() if isinstance(module, PackedModule) else module.weight
        return weight

    @property
    def _table(self) -> Tensor | None:
        """[vocab, hidden] of the lean decoder's embedding, where that is no more than a table."""
        embedding = None if self._recipe is None else self._recipe.embed
        return embedding.tokens if isinstance(embedding, Embedding) else None

    @property
    def _input_layer(self) -> Any:
        return self._model.get_input_embeddings()

    @property
    def _output_layer(self) -> Any:
        return self._model.get_output_embeddings()

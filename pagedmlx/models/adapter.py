"""ModelAdapter: one forward pass of a step through an unmodified mlx-lm model, over the blocks."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import mlx.core as mx

from pagedmlx.errors import UnsupportedModelError
from pagedmlx.kv.layout import KVLayout
from pagedmlx.kv.store import KVStore
from pagedmlx.models.compiled import CompiledDecode, PlansAhead
from pagedmlx.models.hook import install_hook
from pagedmlx.models.layer_cache import GroupRows, RowLayout, TokenRowCache
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.rows import RowSelection
from pagedmlx.models.survey import find_groups, survey_model
from pagedmlx.ops.base import AttentionBackend, PagedBatch


class ModelAdapter:
    """Runs a loaded model over a paged KV cache.

    Holds the attention hook until ``close``. To be used on the thread that loaded the model.

    Args:
        loaded: The model.
        backend: Attends to the blocks.
        block_size: Tokens in one block.
        kv_cache_dtype: Type of the pool's elements by name; ``auto`` is the model's own.

    Attributes:
        loaded: The model.
        backend: As given.
        layout: Groups and shapes of the pool that ``forward`` expects.
        row_layout: How tokens are laid out for the model.
        vocab_size: V of the logits.

    Raises:
        UnsupportedModelError: The model can't be run this way; says why.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        *,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.loaded = loaded
        self.backend = backend
        self.row_layout = RowLayout.TOKEN_ROWS
        self._model: Any = loaded.model
        self._compiled: tuple[KVStore, CompiledDecode] | None = None
        groups = find_groups(loaded.model, loaded.model_type)
        self._hook = install_hook(loaded.model)
        try:
            self._selection = RowSelection(loaded.model)
            survey = survey_model(loaded.model, groups, self._selection, loaded.model_type)
        except BaseException:
            self._hook.undo()
            raise
        self.vocab_size = survey.vocab_size
        self.layout = KVLayout(
            block_size=block_size,
            dtype=survey.dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
            layers=survey.layers,
            groups=survey.groups,
        )

    def forward(self, batch: PagedBatch, store: KVStore) -> mx.array:
        """Write the K and V of every row and return the logits of the rows that sample.

        Nothing is evaluated: the caller commits the logits together with the store, also when
        there are none to sample from.

        Args:
            batch: The step; its block copies are already done.
            store: A pool of this adapter's ``layout``.

        Returns:
            (R, vocab_size) for ``batch.host.sample_rows``, in their order.
        """
        if store.updates_in_place and isinstance(self.backend, PlansAhead):
            logits = self._compiled_for(store, self.backend)(batch)
            if logits is not None:
                return logits
        return self._forward(batch, store)

    def _compiled_for(self, store: KVStore, backend: PlansAhead) -> CompiledDecode:
        if self._compiled is None or self._compiled[0] is not store:
            self._compiled = store, CompiledDecode(self._forward, backend, store)
        return self._compiled[1]

    def _forward(self, batch: PagedBatch, store: KVStore) -> mx.array:
        caches: list[TokenRowCache | None] = [None] * len(self.layout.layers)
        for index, group in enumerate(self.layout.groups):
            rows = GroupRows(store, self.backend, batch, index, group.window)
            for layer in group.layers:
                caches[layer] = TokenRowCache(layer, rows)
        sample_rows: list[int] = batch.host.sample_rows.tolist()
        # With no row to sample from, one row goes to the head but is never computed.
        selected = mx.array(sample_rows or [0])
        all_rows = len(sample_rows) == batch.host.num_rows
        with self._selection.using(lambda hidden: hidden if all_rows else hidden[selected]):
            logits = self._model(batch.token_ids[:, None], cache=caches)
        if not all(cache is None or cache.attended for cache in caches):
            raise UnsupportedModelError(
                f"{self.loaded.model_type}: a layer did its attention by maths of its own",
                hint="run this model with mlx-lm itself, and please report it",
            )
        if not sample_rows:
            return mx.zeros((0, self.vocab_size), dtype=logits.dtype)
        return logits.squeeze(1)

    def last_logits(self, token_ids: mx.array, caches: list[Any]) -> mx.array:
        """The model's own way, with mlx-lm's caches: what ``forward`` is compared with.

        Args:
            token_ids: (L,) int32; the tokens that follow those in the caches.
            caches: From mlx-lm's ``make_prompt_cache``.

        Returns:
            (vocab_size,) logits of the last token.
        """
        with self._selection.using(lambda hidden: hidden[:, -1:]):
            return self._model(token_ids[None], cache=caches)[0, 0]

    def close(self) -> None:
        """Release the attention hook; the model is mlx-lm's again. Idempotent."""
        self._compiled = None
        self._hook.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

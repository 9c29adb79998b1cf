"""ModelAdapter: one forward pass of a step through an unmodified mlx-lm model, over the blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pagedmlx.core.batch import BatchArrays, PooledRows
from pagedmlx.errors import UnsupportedModelError
from pagedmlx.kv.layout import KVLayout
from pagedmlx.kv.states import States
from pagedmlx.kv.store import KVStore
from pagedmlx.models.cache_tree import read_caches
from pagedmlx.models.compiled import CompiledSteps, PlansAhead
from pagedmlx.models.deferred_rope import DeferredRopes, find_deferrable_ropes
from pagedmlx.models.dry_run import can_be_traced
from pagedmlx.models.hand_over import HandOver
from pagedmlx.models.hook import install_hook
from pagedmlx.models.layer_cache import GroupRows, LayerCache
from pagedmlx.models.layer_spans import LayerSpans, layers_in_a_chain
from pagedmlx.models.loader import LoadedModel
from pagedmlx.models.parts import Part, RowLayout, sequence_rows, token_rows
from pagedmlx.models.rows import RowSelection
from pagedmlx.models.survey import survey_model
from pagedmlx.ops.base import AttentionBackend, PagedBatch
from pagedmlx.ops.worklist import bucket

MAX_GATHER_BYTES = 1 << 28
"""Most bytes that sequences which decode together gather in one layer."""

ROW_MULTIPLE = 64
"""Rows that a GPU multiplies at a time at least."""
MIN_PADDED_ROWS = 256
"""Arrays of fewer rows are small."""
SHORT_MULTIPLE = 32
"""Rows of a step that may be compiled have a multiple of this, if there are prompts among them."""
DECODE_SIZES = 4
"""Of steps that decode, from one power of 2 to the next: a quarter is added to the rows at most."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """What a step gives; nothing of it is evaluated.

    Attributes:
        logits: (R, vocab_size) for ``BatchArrays.sample_rows``, in their order; if these are all
            rows of the step, those of its padding follow.
        pooled: (E, hidden) float32, a sum of hidden states for each of ``BatchArrays.pooled``; None
            if there are none.
    """

    logits: mx.array
    pooled: mx.array | None = None


class ModelAdapter:
    """Runs a loaded model over a paged KV cache.

    Holds the attention hook until ``close``. To be used on the thread that loaded the model.

    Args:
        loaded: The model.
        backend: Attends to the blocks.
        block_size: Tokens in one block.
        kv_cache_dtype: Type of the pool's elements by name; ``auto`` is the model's own.
        layouts: Ways to lay out tokens, in the order in which to try them.

    Attributes:
        loaded: The model.
        backend: As given.
        hand_over: Gives the device what there is of a step.
        layout: Groups and shapes of the pool that ``forward`` expects.
        row_layout: How tokens are laid out for the model: the first way that suits it.
        reads_gathers: Whether the model reads K and V itself, at least in some layer.
        vocab_size: V of the logits.
        gives_hidden_states: Whether what is pooled are the model's last hidden states.

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
        layouts: Iterable[RowLayout] = tuple(RowLayout),
    ) -> None:
        self.loaded = loaded
        self.backend = backend
        self.hand_over = HandOver()
        self._model: Any = loaded.model
        self._compiled: tuple[KVStore, CompiledSteps] | None = None
        self._ropes: DeferredRopes | None = None
        self._tree = read_caches(loaded.model, loaded.model_type)
        self._hook = install_hook(loaded.model)
        try:
            self._selection = RowSelection(loaded.model)
            survey = survey_model(
                loaded.model, self._tree, self._selection, loaded.model_type, layouts
            )
        except BaseException:
            self._hook.undo()
            raise
        self.row_layout = survey.row_layout
        self.reads_gathers = survey.reads_gathers
        self._mask_ndim = survey.mask_ndim
        self.vocab_size = survey.vocab_size
        self.gives_hidden_states = self._selection.sees_last_states
        self.layout = KVLayout(
            block_size=block_size,
            dtype=survey.dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
            layers=survey.layers,
            groups=survey.groups,
            state_bytes=survey.state_bytes,
        )
        self._max_gathered = self._max_tokens_to_gather()

    def batch(self, host: BatchArrays, store: KVStore) -> PagedBatch:
        """A step for the device, with rows of padding where that lets steps resemble each other.

        Prompts of ever new sizes would have all arrays allocated anew, which takes a GPU's driver
        longer than some rows more take the GPU. And steps of few sizes are soon compiled, however
        many sequences come and go.

        Args:
            host: The step.
            store: The pool that it will run over.
        """
        num_rows = host.num_rows
        if not self.takes_padding(store):
            return PagedBatch(host)
        if host.only_decodes:
            return PagedBatch(host, bucket(num_rows, DECODE_SIZES) - num_rows)
        if num_rows > MIN_PADDED_ROWS:
            return PagedBatch(host, -num_rows % ROW_MULTIPLE)
        backend = self.backend
        if isinstance(backend, PlansAhead) and host.only_samples and backend.can_plan_ahead(host):
            return PagedBatch(host, -num_rows % SHORT_MULTIPLE)
        return PagedBatch(host)

    def takes_padding(self, store: KVStore) -> bool:
        """Whether a step over this pool may have rows of padding."""
        is_one_call = self.row_layout is RowLayout.TOKEN_ROWS
        return is_one_call and store.updates_in_place and self.backend.takes_padding

    def forward(self, batch: PagedBatch, store: KVStore) -> mx.array:
        """As ``run``, for those who want logits only."""
        return self.run(batch, store).logits

    def run(self, batch: PagedBatch, store: KVStore) -> ModelOutput:
        """Write the K and V of every row and return what is wanted of some rows.

        What the caller gets is not evaluated: it commits all of it together with the store, also
        when there are no logits to sample from.

        Args:
            batch: The step; its block copies are already done.
            store: A pool of this adapter's ``layout``.
        """
        if self.row_layout is not RowLayout.TOKEN_ROWS:
            return self._run_sequences(batch, store)
        if store.updates_in_place and isinstance(self.backend, PlansAhead) and self._can_compile:
            logits = self._compiled_for(store, self.backend)(batch)
            if logits is not None:
                return ModelOutput(logits)
        return self._run_tokens(batch, store)

    @cached_property
    def _can_compile(self) -> bool:
        return can_be_traced(self._model)

    @cached_property
    def _spans(self) -> LayerSpans:
        return LayerSpans(layers_in_a_chain(self._model))

    def _compiled_for(self, store: KVStore, backend: PlansAhead) -> CompiledSteps:
        if self._compiled is None or self._compiled[0] is not store:
            self.drop_store()
            self._compiled = (
                store,
                CompiledSteps(self._logits_of_tokens, backend, store, self._spans, self.hand_over),
            )
        return self._compiled[1]

    def _logits_of_tokens(self, batch: PagedBatch, store: KVStore) -> mx.array:
        return self._run_tokens(batch, store).logits

    def _run_tokens(self, batch: PagedBatch, store: KVStore) -> ModelOutput:
        """The whole step in one call, (T, 1)."""
        return self._call(token_rows(batch), store, self._ropes_for(store))

    def _ropes_for(self, store: KVStore) -> DeferredRopes:
        """Those whose work the pool's writer does; looked for when one comes that can."""
        if not store.can_rotate:
            return DeferredRopes()
        if self._ropes is None:
            self._ropes = find_deferrable_ropes(self._model, self._tree, self._selection)
        return self._ropes

    def _run_sequences(self, batch: PagedBatch, store: KVStore) -> ModelOutput:
        """One call for the sequences that decode, (B, 1), and one for each chunk, (1, L)."""
        found: list[ModelOutput] = []
        parts = sequence_rows(
            batch,
            gathers=self.reads_gathers,
            mask_ndim=self._mask_ndim,
            max_tokens=self._max_gathered,
            fork_points=bool(self._tree.state_layers),
        )
        for part in parts:
            if found:
                # Pools that are updated functionally must have no pending reads.
                store.submit(*_arrays(found[-1]))
            found.append(self._call(part, store, DeferredRopes()))
        if len(found) == 1:
            return found[0]
        pooled = [each.pooled for each in found if each.pooled is not None]
        return ModelOutput(
            mx.concatenate([each.logits for each in found]),
            mx.concatenate(pooled) if pooled else None,
        )

    def _call(self, part: Part, store: KVStore, ropes: DeferredRopes) -> ModelOutput:
        """Call the model once."""
        self.hand_over.begin()
        caches: list[Any] = [None] * len(self._tree.kinds)
        for index, group in enumerate(self.layout.groups):
            rows = GroupRows(store, self.backend, part, index, group.window, ropes, self.hand_over)
            for layer in group.layers:
                caches[layer] = LayerCache(layer, rows)
        states = self._take_states(part, store, caches)
        num_samples, num_rows = len(part.batch.host.sample_rows), part.batch.num_rows
        pooled: mx.array | None = None

        def select(hidden: mx.array) -> mx.array:
            nonlocal pooled
            by_row = hidden
            if hidden.shape[1] > 1:
                by_row = hidden.reshape(num_rows, 1, hidden.shape[-1])
            pooled = _pool(by_row, part.batch.host.pooled)
            if num_samples == part.batch.host.num_rows:
                return by_row
            # With no row to sample from, one goes to the head but is never computed.
            return by_row[part.batch.sample_rows] if num_samples else by_row[:1]

        with self._selection.using(select), ropes.using(part.offset):
            logits = self._model(part.token_ids, cache=self._tree.arrange(caches))
        blocks = (each for each in caches if isinstance(each, LayerCache))
        # A traced step runs some layers only, and has run before as a whole.
        takes_blocks = part.gathers or part.batch.is_traced
        if not takes_blocks and not all(each.attended for each in blocks):
            raise UnsupportedModelError(
                f"{self.loaded.model_type}: a layer did its attention by maths of its own",
                hint="run this model with mlx-lm itself, and please report it",
            )
        if states:
            host = part.batch.host
            store.states.put(
                host.sequences,
                host.context_lens.tolist(),
                States(tuple(tuple(each.cache) for each in states)),
            )
        if not num_samples:
            return ModelOutput(mx.zeros((0, self.vocab_size), dtype=logits.dtype), pooled)
        return ModelOutput(logits.squeeze(1), pooled)

    def _take_states(self, part: Part, store: KVStore, caches: list[Any]) -> list[ArraysCache]:
        """Put the sequences' states into mlx-lm's own caches, which hold nothing else."""
        layers = self._tree.state_layers
        if not layers:
            return []
        host = part.batch.host
        taken = store.states.take(host.sequences, host.positions[:: part.length].tolist())
        for index, layer in enumerate(layers):
            caches[layer] = ArraysCache(self._tree.kinds[layer].num_arrays)
            if taken is not None:
                caches[layer].cache = list(taken.layers[index])
        return [caches[layer] for layer in layers]

    def _max_tokens_to_gather(self) -> int | None:
        if self.row_layout is RowLayout.SINGLE_ROWS:
            return 0
        if not self.reads_gathers:
            return None
        token_bytes = max(
            self.layout.layer_bytes(layer) for group in self.layout.groups for layer in group.layers
        )
        return MAX_GATHER_BYTES // token_bytes

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

    def drop_graphs(self) -> None:
        """Forget compiled steps, which hold the pool's arrays; they are compiled anew."""
        if self._compiled is not None:
            self._compiled[1].drop()

    def drop_store(self) -> None:
        """Forget the pool of the last steps, and its compiled steps."""
        self.drop_graphs()
        self._compiled = None

    def rest(self) -> None:
        """Nothing runs: keep nothing of the last step."""
        self.backend.rest()

    def close(self) -> None:
        """Release the attention hook; the model is mlx-lm's again. Idempotent."""
        self.drop_store()
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


def _pool(by_row: mx.array, wanted: tuple[PooledRows, ...]) -> mx.array | None:
    """Sums of hidden states, (T, 1, hidden), over rows; in float32 whatever their type is."""
    if not wanted:
        return None
    parts = [by_row[each.rows.start : each.rows.stop, 0] for each in wanted]
    return mx.stack([part.astype(mx.float32).sum(axis=0) for part in parts])


def _arrays(output: ModelOutput) -> list[mx.array]:
    return [output.logits] if output.pooled is None else [output.logits, output.pooled]

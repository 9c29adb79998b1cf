"""TokenChooser: from a step's logits to its tokens and what is told of them, in one graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from pagedmlx.core.batch import BatchArrays
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import StepResult, TokenLogprobs
from pagedmlx.sampling.logprobs import read_scores, score_tokens
from pagedmlx.sampling.masks import GrammarMasks
from pagedmlx.sampling.processors import LogitProcessors
from pagedmlx.sampling.rows import put_rows, take_rows
from pagedmlx.sampling.sampler import Sampler, SampleRow


@dataclass(frozen=True, slots=True)
class _Told:
    """A position whose token is told about.

    Attributes:
        seq_id: Of which sequence.
        token_id: The prompt's token; None for the one that is sampled.
        num_top: How many of the most likely tokens to name.
    """

    seq_id: int
    token_id: int | None
    num_top: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen in a step; the device may still be busy with it.

    Attributes:
        places: Sequence id to its place in ``tokens``.
        tokens: (N,) int32.
        arrays: All that is to be evaluated with the step.
        scores: What ``score_tokens`` gives for ``told``; None if that is empty.
        told: Positions whose token is told about.
        constrained: The sequences that follow a grammar.
    """

    places: dict[int, int]
    tokens: mx.array
    arrays: tuple[mx.array, ...]
    scores: mx.array | None
    told: tuple[_Told, ...]
    constrained: tuple[Sequence, ...] = ()

    def read(self, step_id: int) -> StepResult:
        """Wait for the device."""
        tokens: list[int] = np.array(self.tokens).tolist()
        sampled = {seq_id: tokens[place] for seq_id, place in self.places.items()}
        if self.scores is None:
            return StepResult(step_id, sampled)
        logprobs: dict[int, TokenLogprobs] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        scores = read_scores(
            np.array(self.scores),
            (sampled[e.seq_id] if e.token_id is None else e.token_id for e in self.told),
            (each.num_top for each in self.told),
        )
        for each, score in zip(self.told, scores, strict=True):
            if each.token_id is None:
                logprobs[each.seq_id] = score
            else:
                prompts.setdefault(each.seq_id, []).append(score)
        told = {seq_id: tuple(found) for seq_id, found in prompts.items()}
        return StepResult(step_id, sampled, logprobs, told)


class TokenChooser:
    """Processors, grammars, sampler and log probabilities, in their order.

    A grammar comes last before the sampler: whatever else the settings say, its tokens alone are
    left to choose from.

    Args:
        sampler: Chooses from the logits that the processors have changed.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._processors = LogitProcessors()
        self._grammars = GrammarMasks()

    def choose(self, logits: mx.array, host: BatchArrays, token_ids: mx.array) -> Chosen:
        """Build the graph of a step's tokens; nothing is evaluated.

        Args:
            logits: (R or more, V) for ``host.sample_rows``; others behind them are nobody's.
            host: The step.
            token_ids: (T or more,) int32; its tokens, those that only the device knows too.
        """
        logits = logits[: len(host.sample_rows)]
        sampling = list(range(len(host.sample_rows)))
        if len(host.prompt_places):
            for place in reversed(host.prompt_places.tolist()):
                del sampling[place]
        sequences = [host.sample_sequences[place] for place in sampling]
        places = {sequence.seq_id: place for place, sequence in enumerate(sequences)}
        tokens, arrays = mx.zeros(0, mx.int32), []
        following = [place for place, s in enumerate(sequences) if s.request.grammar is not None]
        constrained = tuple(sequences[place] for place in following)
        if sequences:
            newest = host.sample_rows[sampling]
            positions = (host.positions[newest] + 1).tolist()
            rows = [
                SampleRow(s.request.params, s.request.seed, s.index, position, s)
                for s, position in zip(sequences, positions, strict=True)
            ]
            changed = self._processors.apply(take_rows(logits, sampling), rows, token_ids, newest)
            if following:
                masks = mx.array(self._grammars.masks(constrained, changed.shape[1]))
                part = _only_masked(take_rows(changed, following), masks)
                changed = put_rows(changed, following, part)
            tokens = self._sampler.sample(changed, rows)
            arrays = self._processors.sampled(tokens)
        told, scores = _score(logits, host, sampling, tokens)
        if scores is not None:
            arrays.append(scores)
        return Chosen(places, tokens, (tokens, *arrays), scores, told, constrained)

    def read(self, step_id: int, chosen: Chosen) -> StepResult:
        """Wait for the device; the next masks are begun with what it has chosen."""
        result = chosen.read(step_id)
        if not chosen.constrained:
            return result
        sampled = [(each, result.sampled[each.seq_id]) for each in chosen.constrained]
        ended, problems = self._grammars.advance(sampled)
        return replace(result, ended=ended, problems=problems)

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that ended or lost their blocks."""
        seq_ids = list(seq_ids)
        self._processors.drop(seq_ids)
        self._grammars.drop(seq_ids)

    def clear(self) -> None:
        """Forget all sequences."""
        self._processors.clear()
        self._grammars.clear()


# Compiled, so that their constants are brought to the device once, and for few launches.
@mx.compile
def _only_masked(logits: mx.array, masks: mx.array) -> mx.array:
    """Minus infinity for tokens whose bit isn't set: (R, V) logits, (R, ceil(V / 32)) uint32."""
    bits = (masks[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_)
    # What is broken must stay so, to be noticed.
    broken = mx.isnan(logits).any(axis=-1, keepdims=True)
    return mx.where(broken | allowed, logits, -mx.inf)


def _score(
    logits: mx.array, host: BatchArrays, sampling: list[int], tokens: mx.array
) -> tuple[tuple[_Told, ...], mx.array | None]:
    """What is told of the step's tokens, and the graph that finds it out."""
    told: dict[int, _Told] = {}
    for place in sampling:
        sequence = host.sample_sequences[place]
        num_top = sequence.request.params.logprobs
        if num_top is not None:
            told[place] = _Told(sequence.seq_id, None, num_top)
    if len(host.prompt_places):
        known = np.zeros(len(host.sample_rows), np.int32)
        for place in host.prompt_places.tolist():
            sequence = host.sample_sequences[place]
            next_position = int(host.positions[host.sample_rows[place]]) + 1
            known[place] = token = sequence.token_ids[next_position]
            told[place] = _Told(
                sequence.seq_id, token, sequence.request.params.prompt_logprobs or 0
            )
        tokens = put_rows(mx.array(known), sampling, tokens) if sampling else mx.array(known)
    if not told:
        return (), None
    rows = sorted(told)
    entries = tuple(told[row] for row in rows)
    with_top = any(entry.num_top for entry in entries)
    scores = score_tokens(take_rows(logits, rows), take_rows(tokens, rows), with_top=with_top)
    return entries, scores

"""What a pass shows that computes nothing."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from pagedmlx.models.dry_run import can_be_traced, dry_run, lazy_logits
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, tiny_model


@pytest.mark.parametrize("name", CONFIGS)
def test_models_whose_code_looks_at_no_value_can_be_traced(name: str) -> None:
    assert can_be_traced(tiny_model(name).model)


def test_a_model_that_chooses_experts_in_python_can_not() -> None:
    model = tiny_model("dbrx").model
    assert dry_run(model)
    assert not can_be_traced(model)


def test_logits_of_a_pass_are_those_of_all_its_tokens_and_a_failure_gives_none() -> None:
    logits = lazy_logits(tiny_model().model, mx.array([3, 5, 7]))
    assert logits is not None
    assert logits.shape == (1, 3, VOCAB_SIZE)
    assert lazy_logits(nn.Linear(2, 2), mx.array([3])) is None
    assert not dry_run(nn.Linear(2, 2))
    assert not can_be_traced(nn.Linear(2, 2))
    assert mx.zeros(1).item() == 0  # a failed trace leaves MLX as it was

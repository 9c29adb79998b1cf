from __future__ import annotations

import json

from pagedmlx.cli.results import output_row
from pagedmlx.engine.outputs import (
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
)


def token(token_id: int, logprob: float, rank: int) -> TokenLogprob:
    text = chr(token_id)
    return TokenLogprob(token_id, logprob, rank, text, text.encode())


def test_a_row_has_the_log_probabilities_that_were_asked_for() -> None:
    likely, other = token(97, -0.25, 1), token(98, -1.5, 2)
    told = PositionLogprobs(other, (likely, other), 0, 1)
    output = RequestOutput(
        "one",
        None,
        (5, 98),
        (CompletionOutput(0, "b", token_ids=(98,), finish_reason="length", logprobs=(told,)),),
        finished=True,
        prompt_logprobs=(None, told),
    )
    row = output_row(output)
    entry = {
        "token_id": 98,
        "text": "b",
        "logprob": -1.5,
        "rank": 2,
        "top": [
            {"token_id": 97, "text": "a", "logprob": -0.25, "rank": 1},
            {"token_id": 98, "text": "b", "logprob": -1.5, "rank": 2},
        ],
    }
    assert row["outputs"][0]["logprobs"] == [entry]
    assert row["prompt_logprobs"] == [None, entry]


def test_a_row_has_none_that_nobody_asked_for() -> None:
    row = output_row(RequestOutput("one", None, (5,), (CompletionOutput(0, "b"),), finished=True))
    assert "prompt_logprobs" not in row
    assert "logprobs" not in row["outputs"][0]


def test_an_impossible_token_leaves_the_row_json() -> None:
    told = PositionLogprobs(token(97, float("-inf"), 9), (), 0, 1)
    choice = CompletionOutput(0, "a", token_ids=(97,), finish_reason="length", logprobs=(told,))
    row = output_row(RequestOutput("one", None, (5,), (choice,), finished=True))
    assert json.loads(json.dumps(row, allow_nan=False))["outputs"][0]["logprobs"][0] == {
        "token_id": 97,
        "text": "a",
        "logprob": None,
        "rank": 9,
        "top": [],
    }

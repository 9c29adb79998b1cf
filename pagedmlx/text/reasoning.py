"""The switches by which templates let a model reason more, less, or not at all."""

from __future__ import annotations

from typing import Any

from pagedmlx.errors import InvalidRequestError
from pagedmlx.text.answer_style import AnswerStyle

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_HARMONY_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


def effort_variables(effort: object, style: AnswerStyle) -> dict[str, Any]:
    """Variables of the chat template for a reasoning effort.

    Where the template knows no levels, all but ``none`` are the same; where the model doesn't
    reason, all are.

    Args:
        effort: One of ``EFFORTS``; None leaves it to the template.
        style: How the model writes.

    Raises:
        InvalidRequestError: It is something else, or ``none`` for a model that always reasons.
    """
    if effort is None:
        return {}
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise InvalidRequestError(
            "reasoning_effort",
            f"{repr(effort)[:80]} is not known",
            hint=f"what is: {', '.join(EFFORTS)}",
        )
    variables: dict[str, Any] = {
        name: effort != "none" for name in ("enable_thinking", "thinking") if name in style.switches
    }
    if effort == "none":
        if style.reasons and not variables:
            raise InvalidRequestError("reasoning_effort", "'none', but this model always reasons")
    elif "reasoning_effort" in style.switches:
        levels = _HARMONY_EFFORTS if style.is_harmony else {}
        variables["reasoning_effort"] = levels.get(effort, effort)
    return variables

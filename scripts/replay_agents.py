"""Four coding agents at once on one server: all answered, and their prompts come from the cache.

    python scripts/replay_agents.py --model tiny --json FILE      (smollm2 works too; - is stdout)

Each agent is the official client of its API with the requests that a public agent makes: two over
chat completions, one over responses, one over Anthropic's messages. What the server answers goes
back into the conversation in the agent's way, so that all that rewrites a history is in the test:
ids, arguments that are parsed and written anew, times and marks that change. No model of this size
works on code, so the tokens that it chooses are replaced by those of a record, and everything else
is as ever: prompts are computed, K and V stored, shared and found again. `tiny` has random weights;
so has `thinking`, whose template knows tools, and reasoning until the user speaks again.
The exit code is 1 if an answer isn't what was recorded, or if less than 90 % of the prompts'
tokens, from each agent's second turn on, came from the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anthropic
import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.config import EngineConfig
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import Step, StepResult
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.load import load_engine
from scripts.agent_shapes import SYSTEM, TOOLS, TURNS, Turn
from scripts.report import add_json_option, save
from tests.support.agent_model import THINKING_TEMPLATE, save_agent_folder
from tests.support.server import serving

LEAST_HITS = 0.9
NUM_BLOCKS = 3000
MAX_TOKENS = 1024
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Answer:
    """What a turn brought: text, calls (id, name, arguments), and token counts."""

    text: str
    calls: list[tuple[str, str, dict[str, Any]]]
    num_prompt: int
    num_cached: int
    num_output: int


class Agent(Protocol):
    """One agent's way to ask, and to remember."""

    name: str

    def ask(self, asked: str, outputs: list[tuple[str, str]], seed: int) -> Answer:
        """Send what the user says or what the tools gave."""
        ...


class RecordedRunner:
    """Runs every step, and then says that the tokens of the record were chosen.

    Args:
        runner: The engine's own.
        record: Tokens by the seed that a request has.
    """

    depth = 0  # a step's tokens are known before the next one is dispatched

    def __init__(self, runner: Any, record: Mapping[int, list[int]]) -> None:
        self._runner = runner
        self._record = record
        self._sampling: list[Sequence] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def dispatch(self, step: Step) -> None:
        self._sampling = [entry.sequence for entry in step.scheduled if entry.needs_logits]
        self._runner.dispatch(step)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        sampled = dict(result.sampled)
        for sequence in self._sampling:
            seed = sequence.request.params.seed
            if seed is not None:
                sampled[sequence.seq_id] = self._record[seed][sequence.num_output_tokens]
        return replace(result, sampled=sampled)


def recorded_engine(config: EngineConfig) -> Engine:
    """The engine with the record of all agents; each turn of each agent has a seed."""
    engine = load_engine(config)
    end, style = min(engine.tokenizer.eos_token_ids), engine.answer_style
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    record = {
        seed(agent, turn): [*encode(written(each, thinks=style.reasons)), end]
        for agent in range(len(AGENTS))
        for turn, each in enumerate(TURNS)
    }
    engine._runner = RecordedRunner(engine._runner, record)  # type: ignore[assignment]
    return engine


def seed(agent: int, turn: int) -> int:
    return 1000 * agent + turn


def functions() -> list[Any]:
    return [{"type": "function", "function": tool} for tool in TOOLS]


class StreamedChat:
    """Chat completions as editors send them: streams, null content, times in the user's text."""

    name = "chat completions, streamed"

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def ask(self, asked: str, outputs: list[tuple[str, str]], seed: int) -> Answer:
        for call_id, output in outputs:
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        if asked:
            details = f"<environment>\nTime: 10:{len(self._messages):02}\n</environment>"
            parts = [{"type": "text", "text": f"<task>{asked}</task>"}]
            parts.append({"type": "text", "text": details})
            self._messages.append({"role": "user", "content": parts})
        stream: Any = self._client.chat.completions.create(
            model="local",
            messages=self._messages,
            tools=functions(),
            tool_choice="auto",
            temperature=0,
            max_completion_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            seed=seed,
        )
        text, calls, usage = "", {}, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for part in choice.delta.tool_calls or []:
                    call = calls.setdefault(part.index, {"id": part.id, "name": "", "text": ""})
                    call["name"] += part.function.name or ""
                    call["text"] += part.function.arguments or ""
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["text"]},
                }
                for call in calls.values()
            ]
        self._messages.append(message)
        found = [(each["id"], each["name"], json.loads(each["text"])) for each in calls.values()]
        return _chat_answer(text, found, usage)


class WholeChat:
    """Chat completions as a library between agent and server sends them: parts and marks."""

    name = "chat completions, whole"

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        marked = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
        self._messages: list[Any] = [{"role": "system", "content": [marked]}]

    def ask(self, asked: str, outputs: list[tuple[str, str]], seed: int) -> Answer:
        for call_id, output in outputs:
            parts = [{"type": "text", "text": output}]
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": parts})
        if asked:
            self._messages.append({"role": "user", "content": asked})
        completion: Any = self._client.chat.completions.create(
            model="local",
            messages=self._messages,
            tools=functions(),
            parallel_tool_calls=True,
            temperature=0,
            max_tokens=MAX_TOKENS,
            user="agent",
            metadata={"session": "1"},
            seed=seed,
        )
        message = completion.choices[0].message
        # Everything goes back, with fields that only answers have.
        self._messages.append(message.model_dump())
        calls = message.tool_calls or []
        found = [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in calls
        ]
        return _chat_answer(message.content or "", found, completion.usage)


def _chat_answer(text: str, calls: list[tuple[str, str, dict[str, Any]]], usage: Any) -> Answer:
    cached = usage.prompt_tokens_details.cached_tokens
    return Answer(text, calls, usage.prompt_tokens, cached, usage.completion_tokens)


class Responses:
    """Responses as a terminal agent sends them: nothing is stored, all items go back."""

    name = "responses"

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        permissions = (
            "<permissions>\nsandbox: workspace-write\napproval: on-request\n</permissions>"
        )
        where = "<environment_context>\n<cwd>/home/user/orchard</cwd>\n</environment_context>"
        self._items: list[Any] = [_said("developer", permissions), _said("user", where)]

    def ask(self, asked: str, outputs: list[tuple[str, str]], seed: int) -> Answer:
        for call_id, output in outputs:
            self._items.append(
                {"type": "function_call_output", "call_id": call_id, "output": output}
            )
        if asked:
            self._items.append(_said("user", asked))
        with self._client.responses.stream(
            model="local",
            instructions=SYSTEM,
            input=self._items,
            tools=[{"type": "function", "strict": False, **tool} for tool in TOOLS],  # type: ignore[arg-type]
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"effort": "medium", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            prompt_cache_key="session",
            max_output_tokens=MAX_TOKENS,
            temperature=0,
            store=False,
            extra_body={"seed": seed},
        ) as stream:
            response: Any = stream.get_final_response()
        for item in response.output:
            kept = item.model_dump(exclude_none=True, exclude={"id", "status", "parsed_arguments"})
            self._items.append(kept)
        calls = [item for item in response.output if item.type == "function_call"]
        return Answer(
            response.output_text,
            [(call.call_id, call.name, json.loads(call.arguments)) for call in calls],
            response.usage.input_tokens,
            response.usage.input_tokens_details.cached_tokens,
            response.usage.output_tokens,
        )


def _said(role: str, text: str) -> Any:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


class Messages:
    """Anthropic's messages as its own agent sends them: a changing note, marks that move."""

    name = "messages"

    def __init__(self, url: str) -> None:
        self._client = anthropic.Anthropic(
            base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        self._messages: list[Any] = []
        self._num_asked = 0

    def ask(self, asked: str, outputs: list[tuple[str, str]], seed: int) -> Answer:
        self._num_asked += 1
        blocks: list[Any] = [
            {"type": "tool_result", "tool_use_id": call_id, "content": output}
            for call_id, output in outputs
        ]
        if asked:
            reminder = "<system-reminder>\nThe list of steps is empty.\n</system-reminder>"
            blocks += [{"type": "text", "text": reminder}, {"type": "text", "text": asked}]
        for message in self._messages:
            for block in message["content"]:
                block.pop("cache_control", None)
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        self._messages.append({"role": "user", "content": blocks})
        note = f"x-anthropic-billing-header: cc_version=2.1; cch={self._num_asked:05x};"
        mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        with self._client.messages.stream(
            model="local",
            system=[{"type": "text", "text": note}, {"type": "text", "text": SYSTEM, **mark}],  # type: ignore[typeddict-item]
            messages=self._messages,
            tools=[
                {
                    "name": tool["name"],
                    "description": tool["description"],
                    "input_schema": tool["parameters"],
                }
                for tool in TOOLS
            ],
            max_tokens=MAX_TOKENS,
            metadata={"user_id": "user_1_session_1"},
            extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14"},
            extra_query={"beta": "true"},
            extra_body={"temperature": 0, "context_management": {"edits": []}, "seed": seed},
        ) as stream:
            message: Any = stream.get_final_message()
        content = [block.model_dump(exclude_none=True) for block in message.content]
        for block in content:
            block.pop("parsed_output", None)
        self._messages.append({"role": "assistant", "content": content})
        calls = [block for block in message.content if block.type == "tool_use"]
        usage = message.usage
        return Answer(
            "".join(block.text for block in message.content if block.type == "text"),
            [(call.id, call.name, call.input) for call in calls],
            usage.input_tokens + usage.cache_read_input_tokens,
            usage.cache_read_input_tokens,
            usage.output_tokens,
        )


AGENTS: tuple[Callable[[str], Agent], ...] = (StreamedChat, WholeChat, Responses, Messages)


def written(turn: Turn, *, thinks: bool) -> str:
    """What a model writes for a turn; calls in the generic syntax."""
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in turn.calls
    ]
    thought = f"<think>\n{turn.thought}\n</think>\n\n" if thinks else ""
    between = "\n" if thinks else "\n\n"
    return thought + between.join(filter(None, (turn.said, "\n".join(calls))))


def replay(number: int, agent: Agent, num_turns: int) -> dict[str, Any]:
    """The session of one agent, or its beginning."""
    outputs: list[tuple[str, str]] = []
    turns: list[dict[str, Any]] = []
    failures: list[str] = []
    num_before = 0
    for index, turn in enumerate(TURNS[:num_turns]):
        answer = agent.ask(turn.asked, outputs, seed(number, index))
        calls = [(name, arguments) for _, name, arguments in answer.calls]
        if (answer.text, calls) != (
            turn.said,
            [(call.name, call.arguments) for call in turn.calls],
        ):
            failures.append(f"{agent.name}, turn {index}: {answer.text!r} {calls}")
        outputs = [
            (call_id, call.output)
            for (call_id, _, _), call in zip(answer.calls, turn.calls, strict=False)
        ]
        turns.append(
            {
                "prompt_tokens": answer.num_prompt,
                "cached_tokens": answer.num_cached,
                "tokens_of_turn_before": num_before,
                "output_tokens": answer.num_output,
            }
        )
        num_before = answer.num_prompt + answer.num_output
    later = turns[1:]
    cached = sum(turn["cached_tokens"] for turn in later)
    return {
        "agent": agent.name,
        "turns": turns,
        "hits": round(cached / sum(turn["prompt_tokens"] for turn in later), 4),
        "hits_of_shared": round(cached / sum(turn["tokens_of_turn_before"] for turn in later), 4),
        "least_hits_of_a_turn": round(
            min(turn["cached_tokens"] / turn["prompt_tokens"] for turn in later), 4
        ),
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="tiny", help="tiny, thinking, or what pagedmlx serve takes"
    )
    parser.add_argument("--turns", type=int, default=len(TURNS), help="stop after this many")
    add_json_option(parser, default="-")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model: str = options.model
        if model in ("tiny", "thinking"):
            template = THINKING_TEMPLATE if model == "thinking" else None
            model = str(save_agent_folder(Path(folder) / model, template=template))
        config = EngineConfig(model, num_blocks=NUM_BLOCKS)
        with (
            serving(
                partial(recorded_engine, config.for_streams()), served_model_names=("local",)
            ) as server,
            ThreadPoolExecutor(len(AGENTS)) as threads,
        ):
            agents = [make(server.url) for make in AGENTS]
            play = partial(replay, num_turns=options.turns)
            sessions = list(threads.map(play, range(len(AGENTS)), agents))
            server.assert_idle()
    passed = all(not each["failures"] and each["hits"] >= LEAST_HITS for each in sessions)
    save(
        {
            "script": "replay_agents.py",
            "model": options.model,
            "tools": len(TOOLS),
            "agents": sessions,
            "passed": passed,
        },
        options.json,
    )
    for session in sessions:
        hits = f"{session['hits']:.1%} of the prompts cached from the second turn on"
        print(f"{session['agent']}: {hits}", *session["failures"], sep="\n  ", file=sys.stderr)
    sys.exit(not passed)


if __name__ == "__main__":
    main()

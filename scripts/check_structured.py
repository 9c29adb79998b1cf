"""Whether answers under a JSON schema are valid, beside plain requests that must not notice.

    python scripts/check_structured.py --model smollm2 --json FILE     # "-" prints the report
    python scripts/check_structured.py --model FOLDER --answers 20 --json FILE

Answers are sampled at temperature 1, under several schemas with bounded strings and arrays, in one
batch with plain requests, greedy and seeded. Each must end by itself (``length`` is a failure) and
be JSON that its schema allows, by the package jsonschema. The plain requests run once more alone,
and their text must be the same. Weights are float32, where that is promised. Progress goes to
stderr; the exit code is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.models.blas import load_fast_blas

BLAS = load_fast_blas()  # counts only before MLX is imported

import jsonschema

from pagedmlx import LLM, RequestOutput, SamplingParams
from pagedmlx.core.structured import StructuredOutputs
from pagedmlx.engine.outputs import Job
from scripts.report import add_json_option, save


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """An object with all of these properties, and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


_NAME = {"type": "string", "minLength": 1, "maxLength": 24}
SCHEMAS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Describe a person of your choice as JSON.",
        _object(
            {
                "name": _NAME,
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "languages": {"type": "array", "items": _NAME, "minItems": 1, "maxItems": 3},
                "married": {"type": "boolean"},
            }
        ),
    ),
    "order": (
        "Write an order of a small shop as JSON.",
        _object(
            {
                "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                "date": {"type": "string", "format": "date"},
                "lines": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/line"},
                    "minItems": 1,
                    "maxItems": 2,
                },
            }
        )
        | {
            "$defs": {
                "line": _object({"item": _NAME, "count": {"enum": [1, 2, 3, 12]}}),
            }
        },
    ),
    "weather": (
        "What is the weather like? Answer as JSON.",
        _object(
            {
                "sky": {"enum": ["clear", "cloudy", "rain", "snow"]},
                "degrees": {"type": "integer", "minimum": -30, "maximum": 45},
                "warning": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
            }
        ),
    ),
    "shape": (
        "Name a shape with its measures as JSON.",
        {
            "anyOf": [
                _object(
                    {
                        "kind": {"const": "circle"},
                        "radius": {"type": "integer", "minimum": 0, "maximum": 99},
                    }
                ),
                _object(
                    {
                        "kind": {"const": "polygon"},
                        "points": {
                            "type": "array",
                            "items": {
                                "type": "array",
                                "items": {"type": "integer", "minimum": -9, "maximum": 9},
                                "minItems": 2,
                                "maxItems": 2,
                            },
                            "minItems": 3,
                            "maxItems": 5,
                        },
                    }
                ),
            ]
        },
    ),
    "colours": (
        "List some colours as JSON.",
        {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 6},
    ),
}
PLAIN = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "def fibonacci(n):",
    "Name three colours. 🙂",
    "日本の首都はどこですか。",
    "Explain in a few words why the sky is blue, and what changes when the sun goes down.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json_option(parser)
    parser.add_argument("--model", default="smollm2", help="name or folder")
    parser.add_argument("--answers", type=int, default=200, help="how many follow a schema")
    parser.add_argument("--plain", type=int, default=24, help="how many follow none")
    parser.add_argument("--plain-tokens", type=int, default=64, help="length of the latter")
    parser.add_argument("--max-tokens", type=int, default=400, help="limit of the former")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences at once")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled answers")
    options = parser.parse_args()
    report = check(options)
    save(report, options.json)
    return 0 if report["passed"] else 1


def check(options: argparse.Namespace) -> dict[str, Any]:
    plain = list(plain_jobs(options))
    answers = list(structured_jobs(options))
    with LLM(
        options.model, dtype="float32", max_num_seqs=options.max_num_seqs, check_integrity=True
    ) as llm:
        start = time.perf_counter()
        together = run(llm, _mixed(plain, answers))
        seconds = time.perf_counter() - start
        alone = run(llm, plain)
        stats = llm.stats()
        notes = llm.load_notes
    failures = [
        found
        for job in answers
        for found in [_failure(job, together[str(job.request_id)])]
        if found is not None
    ]
    changed = [
        str(job.request_id)
        for job in plain
        if _told(together[str(job.request_id)]) != _told(alone[str(job.request_id)])
    ]
    num_tokens = sum(len(together[str(job.request_id)].outputs[0].token_ids) for job in answers)
    report = {
        "model": options.model,
        "passed": not failures and not changed,
        "answers": len(answers),
        "valid": len(answers) - len(failures),
        "answer_tokens": num_tokens,
        "failures": failures,
        "plain": len(plain),
        "plain_changed": changed,
        "temperature": 1.0,
        "max_tokens": options.max_tokens,
        "max_num_seqs": options.max_num_seqs,
        "seconds": round(seconds, 1),
        "preemptions": stats.num_preemptions,
        "blas": BLAS,
        "notes": notes,
        "examples": {
            name: together[f"{name}-0"].outputs[0].text
            for name in SCHEMAS
            if f"{name}-0" in together
        },
    }
    print(
        f"{report['valid']} of {len(answers)} answers are valid; {len(changed)} of {len(plain)} "
        "plain ones changed",
        file=sys.stderr,
    )
    return report


def plain_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Greedy and seeded ones in turn."""
    for index in range(options.plain):
        params = SamplingParams(
            temperature=float(index % 2), seed=index, max_tokens=options.plain_tokens
        )
        prompt = PLAIN[index // 2 % len(PLAIN)]
        yield Job(messages=_says(prompt), sampling_params=params, request_id=f"plain-{index}")


def structured_jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Each schema in turn."""
    names = list(SCHEMAS)
    for index in range(options.answers):
        name = names[index % len(names)]
        prompt, schema = SCHEMAS[name]
        params = SamplingParams(
            temperature=1.0,
            seed=options.seed * 1_000_003 + index,
            max_tokens=options.max_tokens,
            structured=StructuredOutputs(json_schema=json.dumps(schema)),
        )
        request_id = f"{name}-{index // len(names)}"
        yield Job(messages=_says(prompt), sampling_params=params, request_id=request_id)


def _says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _mixed(plain: list[Job], answers: list[Job]) -> list[Job]:
    """The plain ones spread among the others."""
    every = max(1, len(answers) // max(1, len(plain)))
    mixed = list(answers)
    for index, job in enumerate(plain):
        mixed.insert(index * (every + 1), job)
    return mixed


def run(llm: LLM, jobs: list[Job]) -> dict[str, RequestOutput]:
    """All of them at once; their outputs by request."""
    found: dict[str, RequestOutput] = {}
    for output in llm.generate_iter((replace(job) for job in jobs), max_in_flight=len(jobs)):
        found[output.request_id] = output
        if len(found) % 20 == 0:
            print(f"{len(found)} of {len(jobs)} have ended", file=sys.stderr, flush=True)
    return found


def _told(output: RequestOutput) -> list[Any]:
    return [(each.text, each.token_ids, each.finish_reason) for each in output.outputs]


def _failure(job: Job, output: RequestOutput) -> dict[str, Any] | None:
    """What is wrong with an answer, if anything is."""
    name = str(job.request_id).rpartition("-")[0]
    if output.error is not None:
        return {"request": output.request_id, "error": str(output.error)}
    answer = output.outputs[0]
    problem = "" if answer.finish_reason == "stop" else f"ended by {answer.finish_reason}"
    try:
        jsonschema.validate(
            json.loads(answer.text),
            SCHEMAS[name][1],
            format_checker=jsonschema.FormatChecker(formats=["date"]),
        )
    except ValueError as error:
        problem = problem or f"no JSON: {error}"
    except jsonschema.ValidationError as error:
        problem = problem or error.message
    return (
        {"request": output.request_id, "error": problem, "text": answer.text} if problem else None
    )


if __name__ == "__main__":
    sys.exit(main())

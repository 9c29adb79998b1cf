"""Greedy tokens of the paged engine against mlx-lm's own generation, case by case.

    python scripts/parity.py --model smollm2 --json FILE     # "-" prints the report
    python scripts/parity.py --families --json FILE          # tiny random models of eight families
    python scripts/parity.py --model tiny:gemma3_text        # one of them, or any model type

Each case must give exactly mlx-lm's tokens for every prompt: alone, all in one batch, cold and then
again from the prefix cache, as n forks, with a pool so small that sequences are preempted, and with
prompts computed in chunks of 7. Progress goes to stderr; the exit code is 1 if any token differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.models.blas import load_fast_blas

BLAS = load_fast_blas()  # counts only before MLX is imported

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from pagedmlx import LLM, EngineConfig, RequestOutput, SamplingParams
from pagedmlx.hub import resolve
from pagedmlx.models.loader import load_model
from pagedmlx.text.gguf_tokenizer import tokenizer_from_gguf
from pagedmlx.text.tokenizer import Tokenizer, load_tokenizer
from scripts.report import add_json_option, save

NUM_TOKENS = 48
NUM_FORKS = 3
TINY = "tiny:"
FAMILIES = (
    *("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"),
    *("mixtral", "deepseek_v3", "qwen3_5"),
)
LENGTHS = (
    *(1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 57, 64),
    *(65, 80, 96, 111, 127, 128, 129, 160, 200, 256, 377, 600),
)
QUICK_LENGTHS = (1, 15, 16, 17, 33, 64, 90, 130)

TEXTS = {
    "English": (
        "The lighthouse keeper wrote down the weather every evening. On Monday the wind came from "
        "the west and the sea was grey. On Tuesday a fishing boat asked for shelter, and its crew "
        "of four stayed for supper. They talked about the harbour, about the price of diesel and "
        "about a whale that one of them had seen near the northern rocks. "
    ),
    "Japanese": (
        "東京は日本の首都であり、世界でも最も人口の多い都市の一つです。春には桜が咲き、多くの人が"
        "公園に集まります。電車はとても正確で、朝の通勤時間には大変混雑します。"
    ),
    "code": (
        "def merge(left: list[int], right: list[int]) -> list[int]:\n    result = []\n"
        "    i = j = 0\n    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n"
        "        else:\n            result.append(right[j])\n            j += 1\n"
        "    return result + left[i:] + right[j:]\n\n\n"
    ),
    "emoji": (
        "Party plan 🎉: cake 🎂, music 🎶, and 3 friends 👩‍👩‍👧. Weather ☀️ → maybe 🌧️! "
        "Score: 10/10 🙂👍🏽 (see you at 7 ⏰). "
    ),
}


@dataclass
class Case:
    """One way to run the prompts, and what came of it."""

    name: str
    settings: dict[str, Any]
    run: Callable[[LLM, Sequence[Sequence[int]]], Iterator[list[Sequence[int]]]]
    equal: int = 0
    of: int = 0
    seconds: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)


def params(n: int = 1) -> SamplingParams:
    """Greedy, and never ended by the model, so that every prompt compares as many tokens."""
    return SamplingParams(n=n, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def tokens(outputs: Sequence[RequestOutput]) -> list[Sequence[int]]:
    """The tokens of every output of every request, in order."""
    return [each.token_ids for output in outputs for each in output.outputs]


def run_solo(llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """One prompt at a time."""
    yield [tokens(llm.generate(prompt, params()))[0] for prompt in prompts]


def run_batch(llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """All prompts at once."""
    yield tokens(llm.generate(prompts, params()))


def run_twice(llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """All at once, cold; then again, when their beginnings are in the prefix cache."""
    yield from run_batch(llm, prompts)
    yield from run_batch(llm, prompts)


def run_forks(llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Several outputs of each prompt, which must all be the same."""
    outputs = tokens(llm.generate(prompts, params(NUM_FORKS)))
    for index in range(NUM_FORKS):
        yield outputs[index::NUM_FORKS]


def make_cases(lengths: Sequence[int]) -> list[Case]:
    """The cases of the report."""
    # The largest request fits alone, and not much beside it.
    small_pool = -(-(max(lengths) + NUM_TOKENS) // 16) + 2
    no_cache = {"enable_prefix_caching": False}
    return [
        Case("solo", no_cache, run_solo),
        Case("batch", no_cache, run_batch),
        Case("prefix_cache", {}, run_twice),
        Case("forks", no_cache, run_forks),
        Case("preemption", {"num_blocks": small_pool}, run_batch),
        Case("chunks_of_7", {"prefill_chunk_size": 7, **no_cache}, run_batch),
    ]


def reference(model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """mlx-lm's own greedy tokens, each prompt alone."""
    results = []
    for index, prompt in enumerate(prompts):
        note(f"mlx-lm: prompt {index + 1} of {len(prompts)}, {len(prompt)} tokens")
        steps = generate_step(mx.array(list(prompt)), model, max_tokens=NUM_TOKENS)
        results.append([int(token) for token, _ in steps])
    return results


def make_prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of exactly these lengths, the kinds of text taking turns."""
    prompts = []
    kinds = tuple(TEXTS.values())
    for index, length in enumerate(lengths):
        # Different beginnings, so that prompts share no blocks by accident.
        text = f"{index}. " + kinds[index % len(kinds)] * 40
        prompts.append(tokenizer.encode(text)[:length])
    return prompts


def run_case(case: Case, model: str, prompts: list[list[int]], expected: list[list[int]]) -> bool:
    """Run one case on an engine of its own and count equal outputs.

    Returns:
        Whether the model keeps recurrent states.
    """
    config = EngineConfig(
        model=model, dtype="float32", check_integrity=True, pool_fill=float("nan"), **case.settings
    )
    with closing(LLM(config=config)) as llm:
        note(f"{case.name}: {llm.load_notes[-1]}")
        start = time.perf_counter()
        for outputs in case.run(llm, prompts):
            for index, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
                case.of += 1
                case.equal += list(found) == wanted
                if list(found) != wanted:
                    case.differences.append(difference(index, prompts[index], found, wanted))
        case.seconds = time.perf_counter() - start
        stats = llm.stats()
    case.num_preemptions = stats.num_preemptions
    case.num_cached_tokens = stats.num_cached_tokens
    note(f"{case.name}: {case.equal} of {case.of} equal, {case.seconds:.0f} s")
    return stats.state_bytes > 0


def difference(
    index: int, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]
) -> dict[str, Any]:
    """Where an output leaves mlx-lm's."""
    first = next(
        (at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
        min(len(found), len(wanted)),
    )
    return {"prompt": index, "num_prompt_tokens": len(prompt), "first_difference": first}


def note(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help="name, folder, GGUF file or tiny:TYPE")
    add_json_option(parser, default="-")
    parser.add_argument(
        "--families", action="store_true", help="tiny random models of eight families instead"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts")
    options = parser.parse_args()

    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    models = [f"{TINY}{family}" for family in FAMILIES] if options.families else [options.model]
    reports: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            name = model.removeprefix(TINY)
            path = resolve(model).path if name == model else save_tiny(Path(folder) / name, name)
            reports[model] = run_model(path, lengths)
            note(f"{model}: {'all equal' if reports[model]['good'] else 'DIFFERENT'}")

    common = {"dtype": "float32", "blas": BLAS, "num_tokens": NUM_TOKENS}
    if options.families:
        save(common | {"models": reports}, options.json)
    else:
        save({"model": options.model} | common | reports[options.model], options.json)
    return 0 if all(report["good"] for report in reports.values()) else 1


def save_tiny(path: Path, name: str) -> Path:
    """Write a folder with a tiny random model."""
    from tests.support.tiny_models import save_tiny_folder

    return save_tiny_folder(path, name)


def run_model(path: Path, lengths: Sequence[int]) -> dict[str, Any]:
    """Run all cases on one model and report on them."""
    loaded = load_model(path, dtype="float32")
    tokenizer = (
        load_tokenizer(path, eos_token_ids=loaded.eos_token_ids)
        if loaded.gguf_metadata is None
        else tokenizer_from_gguf(loaded.gguf_metadata, source=path.name)
    )
    prompts = make_prompts(tokenizer, lengths)
    expected = reference(loaded.model, prompts)
    cases = make_cases(lengths)
    keeps_states = False
    for case in cases:
        keeps_states |= run_case(case, str(path), prompts, expected)
    by_name = {case.name: case for case in cases}
    return {
        "good": all(case.equal == case.of for case in cases)
        and by_name["preemption"].num_preemptions > 0
        # A recurrent state can't be reused from the prefix cache.
        and (by_name["prefix_cache"].num_cached_tokens > 0) is not keeps_states,
        "num_prompts": len(prompts),
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "cases": {
            case.name: {
                "equal": case.equal,
                "of": case.of,
                "num_preemptions": case.num_preemptions,
                "num_cached_tokens": case.num_cached_tokens,
                "seconds": round(case.seconds, 1),
                "differences": case.differences,
            }
            for case in cases
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())

"""Checks on this machine's device what the tests can only check where they ran; one JSON report.

Meant for a Mac, where MLX computes with Metal; it runs on any machine that MLX runs on and says in
the report which device it was. The exit code is 1 when a check fails.

    python scripts/verify_on_mac.py --json report.json     # "-" prints the report
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from pagedmlx.models.blas import load_fast_blas  # noqa: E402

# It counts only before MLX is imported, which the imports below do.
BLAS = load_fast_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from pagedmlx.core.groups import KVGroup, KVGroupKind  # noqa: E402
from pagedmlx.core.sampling_params import SamplingParams  # noqa: E402
from pagedmlx.core.step import INVALID_TOKEN  # noqa: E402
from pagedmlx.kv.layout import KVLayout, LayerShape  # noqa: E402
from pagedmlx.kv.store import KVStore  # noqa: E402
from pagedmlx.ops import make_backend  # noqa: E402
from pagedmlx.ops.base import AttentionParams  # noqa: E402
from pagedmlx.sampling.sampler import Sampler, SampleRow  # noqa: E402
from tests.support.attention import TOLERANCES, make_case  # noqa: E402

Check = Callable[[], tuple[bool, dict[str, Any]]]
"""Runs one check: whether it passed, and the numbers behind that."""

# Lengths around block edges and around the lengths where MLX changes its attention kernel.
DECODES = tuple((n - 1, 1) for n in (1, 16, 17, 255, 1023, 1024, 1025, 1026, 4095, 4096, 4097))
MIXED = (*((n - 1, 1) for n in (1, 16, 17, 300)), (0, 5), (30, 3), (255, 33))

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "def fibonacci(n):",
    "日本の首都はどこですか。",
    "Name three colours. 🙂",
    "Count from one to ten: one, two,",
    "Explain in a few words why the sky is blue, and what changes when the sun goes down. " * 6,
    "Hi",
)
NUM_TOKENS = 16


def check_attention(backend: str, dtype: str) -> tuple[bool, dict[str, Any]]:
    """Compare with float64, the dead slots of the pool holding NaN."""
    worst = 0.0
    for spans, factor, window in (
        (DECODES, 1, None),
        (DECODES, 4, None),
        (MIXED, 3, None),
        (MIXED, 3, 19),
    ):
        case = make_case(spans, factor=factor, k_head_dim=64, v_head_dim=64, dtype=dtype)
        params = AttentionParams(scale=0.125, window=window)
        error = np.abs(case.attend(make_backend(backend), params) - case.expected(params)).max()
        # NaN must not get lost in a maximum.
        worst = error if np.isnan(error) else max(worst, float(error))
    return bool(worst <= TOLERANCES[dtype]), {
        "max_error": float(worst),
        "tolerance": TOLERANCES[dtype],
    }


def check_pool_is_not_copied() -> tuple[bool, dict[str, Any]]:
    """Write, copy blocks and read for some steps; the peak must stay far below a pool more."""
    layout = KVLayout(
        block_size=16,
        dtype="float16",
        layers=(LayerShape(8, 128, 128),) * 2,
        groups=(KVGroup(KVGroupKind.FULL, (0, 1)),),
    )
    store = KVStore(layout, (1024,))
    table = mx.arange(4, dtype=mx.int32)[None]
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for step in range(30):
        rows = mx.full((4, 8, 128), step, mx.float16)
        store.copy_blocks(0, np.array([0], np.int32), np.array([8], np.int32))
        reads: list[mx.array] = []
        for layer in range(2):
            store.write(layer, rows, rows, mx.arange(4, dtype=mx.int64) * 16 + step % 16)
            reads += [part.sum() for part in store.gather(layer, table)]
        store.commit(*reads)
    grown = mx.get_peak_memory() - before
    # One layer's K alone; any copy would be at least this.
    limit = 1024 * layout.block_bytes(0) // 4
    return grown < limit, {"peak_growth_bytes": grown, "limit_bytes": limit}


def check_sampler() -> tuple[bool, dict[str, Any]]:
    """Greedy ties, broken rows, neighbours, and frequencies against the exact distribution."""
    logits = [0.3, 2.0, -1.0, 1.1, 0.0, 1.7, -3.0, 0.9]
    sampler, count = Sampler(), 4000
    rows = [SampleRow(SamplingParams(top_k=5), 3, 0, position) for position in range(count)]
    batch = mx.array([logits] * count)
    tokens = np.array(sampler.sample(batch, rows))
    alone = np.array(sampler.sample(batch[7:9], rows[7:9]))
    likely = np.exp(np.array(logits))
    likely[np.argsort(likely)[:3]] = 0.0
    likely /= likely.sum()
    off = np.abs(np.bincount(tokens, minlength=8) - count * likely)
    greedy = [SampleRow(SamplingParams(temperature=0.0), 1, 0, 0)] * 2
    special = sampler.sample(mx.array([[1.0, 4.0, 4.0], [1.0, float("nan"), 2.0]]), greedy)
    parts = {
        "frequencies": bool((off <= 6 * np.sqrt(count * likely * (1 - likely))).all()),
        "neighbours": alone.tolist() == tokens[7:9].tolist(),
        "ties_and_nan": special.tolist() == [1, INVALID_TOKEN],
    }
    return all(parts.values()), parts


def check_parity(model: str) -> tuple[bool, dict[str, Any]]:
    """Greedy tokens of a batch through the paged engine against mlx-lm's own, in float32."""
    from mlx_lm.generate import generate_step

    from pagedmlx import LLM, hub
    from pagedmlx.models.loader import load_model

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(model, dtype="float32", prefill_chunk_size=64, check_integrity=True) as llm:
        outputs = llm.generate(list(PROMPTS), params)
    reference = load_model(hub.resolve(model).path, dtype="float32").model
    equal = 0
    for output in outputs:
        prompt = mx.array(output.prompt_token_ids)
        steps = generate_step(prompt, reference, max_tokens=NUM_TOKENS)
        expected = [int(token) for token, _ in steps]
        equal += list(output.outputs[0].token_ids) == expected
    # On a GPU the shapes of a batch round differently from a single row's, so a near tie may flip.
    allowed = 0 if mx.default_device().type == mx.DeviceType.cpu else 1
    return len(PROMPTS) - equal <= allowed, {
        "equal": equal,
        "of": len(PROMPTS),
        "allowed_different": allowed,
    }


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY
    )
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "mlx_device": str(mx.default_device()),
        "metal": mx.metal.is_available(),
        "device": mx.device_info(),
        "blas": BLAS,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("mlx", "mlx-lm", "numpy", "transformers")
        },
        "revision": revision.stdout.strip(),
    }


def run(name: str, check: Check) -> dict[str, Any]:
    """Run one check and say how it went; a failure of any kind is part of the report."""
    start = time.perf_counter()
    try:
        ok, detail = check()
    except Exception:
        ok, detail = False, {"error": traceback.format_exc()}
    seconds = round(time.perf_counter() - start, 2)
    print(f"{'ok  ' if ok else 'FAIL'} {name} {json.dumps(detail)}", file=sys.stderr)
    return {"name": name, "ok": ok, "seconds": seconds, **detail}


def main() -> int:
    """Run every check and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", default="-", metavar="FILE", help="where the report goes")
    parser.add_argument("--model", default="smollm2", help="model for the comparison with mlx-lm")
    options = parser.parse_args()

    checks: dict[str, Check] = {
        f"attention {backend} {dtype}": lambda backend=backend, dtype=dtype: check_attention(
            backend, dtype
        )
        for backend in ("reference", "gather")
        for dtype in TOLERANCES
    }
    checks["the pool is not copied"] = check_pool_is_not_copied
    checks["sampler"] = check_sampler
    checks[f"parity with mlx-lm, {options.model}"] = lambda: check_parity(options.model)

    results = [run(name, check) for name, check in checks.items()]
    report = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "ok": all(result["ok"] for result in results),
        "kernels": "none yet: attention runs on MLX's own operations",
        **machine(),
        "checks": results,
    }
    text = json.dumps(report, indent=2) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        # Written under another name first, so that no half report is ever seen.
        draft = Path(f"{options.json}.part")
        draft.write_text(text)
        os.replace(draft, options.json)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

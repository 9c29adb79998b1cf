"""``pagedmlx bench``: how fast a model or an endpoint is, on work that is the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedmlx.cli import render
from pagedmlx.cli.options import ENGINE_FLAGS, MODEL_FLAG, FlagGroup, with_flags
from pagedmlx.config import EngineConfig
from pagedmlx.errors import InvalidRequestError, readable_bytes

if TYPE_CHECKING:
    from pagedmlx.bench.offline import Offline
    from pagedmlx.bench.workload import Workload

bench = typer.Typer(
    name="bench",
    help="Measure speed: one stream, a batch, a running endpoint, shared prompt beginnings.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Model = Annotated[str | None, typer.Argument(help="Model; smollm2 unless given.")]
_Inputs = Annotated[int, typer.Option(help="Tokens of a prompt, on average.", metavar="N")]
_Outputs = Annotated[int, typer.Option(help="Tokens of an output, on average.", metavar="N")]
_Spread = Annotated[
    float, typer.Option(help="Sigma of lognormal lengths; 0: all are equal.", metavar="X")
]
_Seed = Annotated[int, typer.Option(help="Of lengths, texts and arrivals.", metavar="N")]
_Json = Annotated[
    str | None,
    typer.Option("--json", help="Write the report there; - is stdout.", metavar="FILE"),
]
_HEADING = ("", "mean", "median", "90 %", "99 %", "most")


def latency(
    ctx: typer.Context,
    config: EngineConfig,
    model_flag: str | None,
    model: _Model = None,
    input_len: _Inputs = 512,
    output_len: _Outputs = 128,
    runs: Annotated[int, typer.Option(help="Streams, one after another.", metavar="N")] = 5,
    warm: Annotated[int, typer.Option(help="Streams before them.", metavar="N")] = 1,
    seed: _Seed = 0,
    as_json: _Json = None,
) -> None:
    """Measure one stream at a time: time to the first token, and between tokens."""
    if warm < 0:
        raise InvalidRequestError("warm", f"{warm} must be at least 0")
    workload = _workload(runs, input_len, output_len, 0.0, seed, count="runs")
    with _offline(config, model or model_flag, as_json) as (offline, report):
        found = offline.latency(workload, warm)
    _finish("latency", report, workload, found, as_json)


def throughput(
    ctx: typer.Context,
    config: EngineConfig,
    model_flag: str | None,
    model: _Model = None,
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.", metavar="N")] = 64,
    input_len: _Inputs = 512,
    output_len: _Outputs = 128,
    spread: _Spread = 0.0,
    seed: _Seed = 0,
    as_json: _Json = None,
) -> None:
    """Measure a batch of requests that all come at once."""
    workload = _workload(num_prompts, input_len, output_len, spread, seed)
    with _offline(config, model or model_flag, as_json) as (offline, report):
        found = offline.throughput(workload)
    _finish("throughput", report, workload, found, as_json)


def prefix(
    ctx: typer.Context,
    config: EngineConfig,
    model_flag: str | None,
    model: _Model = None,
    prefix_len: Annotated[int, typer.Option(help="Tokens in common.", metavar="N")] = 1024,
    groups: Annotated[int, typer.Option(help="Groups with a beginning each.", metavar="N")] = 3,
    num_prompts: Annotated[int, typer.Option(help="Requests of a group.", metavar="N")] = 5,
    input_len: _Inputs = 32,
    output_len: _Outputs = 16,
    spread: _Spread = 0.0,
    seed: _Seed = 0,
    as_json: _Json = None,
) -> None:
    """Measure what equal prompt beginnings save: hit rates, time to the first token.

    The first request of a group is cold, those after it are warm; one more group comes all at once.
    --input-len counts what each request has of its own.
    """
    for field, value in (("prefix_len", prefix_len), ("groups", groups)):
        _check_at_least_1(field, value)
    workload = _workload(num_prompts, input_len, output_len, spread, seed)
    with _offline(config, model or model_flag, as_json) as (offline, report):
        found = offline.prefix(workload, prefix_len, groups)
    _finish("prefix", report | {"prefix_len": prefix_len}, workload, found, as_json)


def serve(
    url: Annotated[
        str, typer.Option(help="Any OpenAI endpoint.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="A key of the endpoint.", metavar="KEY")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Its name there; the first one unless given.")
    ] = "",
    rates: Annotated[
        str,
        typer.Option(help="Requests a second, one run each; inf is all at once.", metavar="X,X"),
    ] = "1,inf",
    num_prompts: Annotated[int, typer.Option(help="Requests of a run.", metavar="N")] = 32,
    input_len: _Inputs = 256,
    output_len: _Outputs = 64,
    spread: _Spread = 0.0,
    max_ttft_ms: Annotated[
        float, typer.Option(help="Goodput: the first token comes within this.", metavar="X")
    ] = 2000,
    max_itl_ms: Annotated[
        float, typer.Option(help="Goodput: 95 % of the others follow within this.", metavar="X")
    ] = 250,
    completions: Annotated[
        bool, typer.Option("--completions", help="Ask /completions, not /chat/completions.")
    ] = False,
    ignore_eos: Annotated[
        bool,
        typer.Option(help="Ask for full lengths; not every endpoint knows how."),
    ] = True,
    seed: _Seed = 0,
    as_json: _Json = None,
) -> None:
    """Measure a running endpoint at arrival rates, and how many it serves well (goodput).

    Texts are made of common words, about one token each; the endpoint's own counts are reported.
    """
    chosen = _parse_rates(rates)
    workload = _workload(num_prompts, input_len, output_len, spread, seed)
    for field, value in (("max_ttft_ms", max_ttft_ms), ("max_itl_ms", max_itl_ms)):
        if not value > 0:
            raise InvalidRequestError(f"--{field.replace('_', '-')}", f"{value} must be above 0")
    _check_target(as_json)
    import asyncio

    from pagedmlx.bench.endpoint import Ask, Endpoint, serve_at_rate
    from pagedmlx.bench.measure import Bounds
    from pagedmlx.bench.surroundings import surroundings

    bounds = Bounds(max_ttft_ms / 1000, max_itl_ms / 1000)
    endpoint = Endpoint(url, Ask(model, completions, ignore_eos), api_key or "")

    async def run() -> list[dict[str, Any]]:
        async with endpoint:
            with render.meter() as meter:
                return [
                    await serve_at_rate(
                        endpoint,
                        workload,
                        rate,
                        bounds,
                        lambda done, of, rate=rate: meter.count(f"{rate:g} a second", done, of),
                    )
                    for rate in chosen
                ]

    found = asyncio.run(run())
    report = surroundings() | {
        "url": endpoint.url,
        "model": endpoint.model,
        "bounds": asdict(bounds),
    }
    _finish("serve", report, workload, {"rates": found}, as_json)
    if all(run["num_failed"] == run["num_requests"] for run in found):
        hint = "--no-ignore-eos, if it doesn't know that field" if ignore_eos else ""
        render.error(f"every request failed: {found[0]['errors'][0]}", hint)
        raise typer.Exit(1)


def _parse_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise InvalidRequestError(
            "--rates", f"{text!r} is no list of numbers above 0", hint="such as 0.5,2,inf"
        )
    return rates


def _workload(
    num_requests: int,
    input_len: int,
    output_len: int,
    spread: float,
    seed: int,
    *,
    count: str = "num_prompts",
) -> Workload:
    numbers = {count: num_requests, "input_len": input_len, "output_len": output_len}
    for field, value in numbers.items():
        _check_at_least_1(field, value)
    if not 0 <= spread <= 3:
        raise InvalidRequestError("--spread", f"{spread} must be from 0 to 3")
    if seed < 0:
        raise InvalidRequestError("--seed", f"{seed} must be at least 0")
    from pagedmlx.bench.workload import Workload

    return Workload(num_requests, input_len, output_len, spread, seed)


def _check_at_least_1(field: str, value: int) -> None:
    if value < 1:
        raise InvalidRequestError(f"--{field.replace('_', '-')}", f"{value} must be at least 1")


def _check_target(target: str | None) -> None:
    from pagedmlx.cli.results import check_writable

    if target is not None and target != "-":
        check_writable(Path(target))


@contextmanager
def _offline(
    config: EngineConfig, model: str | None, target: str | None
) -> Iterator[tuple[Offline, dict[str, Any]]]:
    """A loaded model to measure, and the beginning of the report."""
    from functools import partial

    from pagedmlx import hub
    from pagedmlx.bench.offline import Offline
    from pagedmlx.bench.surroundings import surroundings
    from pagedmlx.engine.load import load_engine
    from pagedmlx.engine.worker import EngineWorker

    config = replace(config, model=model or EngineConfig().model)
    _check_target(target)
    # Before MLX is imported, so that a wrong name is told at once.
    with render.download() as show:
        hub.resolve(config.model, config.revision, config.offline, show)
    with render.meter() as meter:
        meter.stage("starting")
        worker = EngineWorker(partial(load_engine, config), meter.stage)
        try:
            worker.start().result()
            notes = list(worker.engine.notes)
            for note in notes:
                render.notice(note)
            report = surroundings() | {
                "model": config.model,
                "config": asdict(config),
                "notes": notes,
            }
            yield Offline(worker, meter.count), report
        finally:
            worker.close()


def _finish(
    kind: str,
    report: dict[str, Any],
    workload: Workload,
    found: dict[str, Any],
    target: str | None,
) -> None:
    """Show what was found and write the report."""
    whole = {"benchmark": kind} | report | {"workload": asdict(workload)} | found
    if target == "-":
        render.json_document(whole)
        return
    for title, rows in _tables(kind, found):
        render.grid(title, rows)
    if target is not None:
        import json

        from pagedmlx.cli.results import write_whole

        write_whole(Path(target), json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def _tables(kind: str, found: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    if kind == "serve":
        yield "requests a second", [_RATE_HEADING, *map(_rate_row, found["rates"])]
        return
    if kind == "prefix":
        for name in ("cold", "warm", "burst"):
            if name in found:
                hits = f"{name}: {found[name]['hit_rate']:.0%} of the prompts' tokens were cached"
                yield hits, [_HEADING, *_rows(found[name])]
        if found["warm_ttft_over_cold"] is not None:
            yield f"warm TTFT is {found['warm_ttft_over_cold']:.0%} of cold", []
        return
    title = f"{found['num_requests']} requests, {found['num_output_tokens']:,} tokens out"
    if kind == "throughput":
        title += (
            f" in {found['wall_s']:.1f} s: {found['output_tokens_per_s']:,.1f} tokens/s, "
            f"{found['total_tokens_per_s']:,.1f} with prompts; "
            f"at most {readable_bytes(found['kv_peak_bytes'])} of K and V, "
            f"{found['engine']['num_preemptions']} preempted"
        )
    yield title, [_HEADING, *_rows(found)]


_NAMES = {
    "ttft_s": ("time to first token, ms", 1000.0),
    "itl_s": ("between tokens, ms", 1000.0),
    "prompt_tokens_per_s": ("prompt tokens/s", 1.0),
    "decode_tokens_per_s": ("output tokens/s", 1.0),
}


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, (name, scale) in _NAMES.items():
        if found.get(key):
            yield name, *(f"{value * scale:,.1f}" for value in found[key].values())


_RATE_HEADING = (
    *("asked", "done", "goodput", "tokens/s", "TTFT ms, median", "99 %"),
    *("ITL ms, median", "99 %", "failed"),
)


def _rate_row(run: dict[str, Any]) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f}"

    def times(key: str) -> tuple[str, str]:
        found = run[key]
        if not found:
            return "-", "-"
        return f"{found['p50'] * 1e3:,.0f}", f"{found['p99'] * 1e3:,.0f}"

    return (
        "all at once" if run["rate_per_s"] is None else f"{run['rate_per_s']:g}",
        *(number(run[key]) for key in ("requests_per_s", "goodput_per_s", "output_tokens_per_s")),
        *times("ttft_s"),
        *times("itl_s"),
        str(run["num_failed"]),
    )


_ENGINE = (FlagGroup("config", EngineConfig, ENGINE_FLAGS),)
_MODEL = replace(MODEL_FLAG, help="Model to measure, instead of the argument.")
for _command in (latency, throughput, prefix):
    bench.command()(with_flags(_command, _ENGINE, _MODEL))
bench.command()(serve)

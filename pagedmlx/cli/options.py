"""The flags that commands share, once: what each is called and which setting it fills.

Defaults and checks are those of EngineConfig and SamplingParams; a value comes from the flag, else
from the environment (``PAGEDMLX_<FLAG>``), else from the config file, else it is the default.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import InvalidRequestError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        field: The setting that it fills, and the name of the command's parameter.
        help: One sentence.
        type: What typer shall parse; a list type makes the flag repeatable.
        default: None takes the default of the setting.
        name: The long flag without its dashes; empty derives it from the field.
        short: A one-letter form, dash included.
        parser: Turns the text into the value, for types that typer doesn't know.
        metavar: How the help names the value.
    """

    field: str
    help: str
    type: Any
    default: object = None
    name: str = ""
    short: str = ""
    parser: Callable[[Any], object] | None = None
    metavar: str | None = None

    @property
    def key(self) -> str:
        """The flag without dashes in front; also its key in the config file."""
        return self.name or self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that gives the value when the flag doesn't."""
        return _variable(self.key)

    def parameter(self, default: object) -> inspect.Parameter:
        """The command's parameter, as typer reads it."""
        long = f"--{self.key}/--no-{self.key}" if self.type is bool else f"--{self.key}"
        # Parsers of our own for numbers too: typer's messages leave the value out.
        number = {int: ("N", _whole_number), float: ("X", _number)}.get(_plain(self.type))
        metavar, parser = number if number and not self.parser else (self.metavar, self.parser)
        option = typer.Option(
            *(name for name in (long, self.short) if name),
            envvar=self.variable,
            show_envvar=False,
            help=self.help,
            parser=parser,
            metavar=metavar,
            show_default=default is not None and default != [],
        )
        return inspect.Parameter(
            self.field,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[self.type, option],
        )


def parse_size(value: str | int) -> int:
    """Read a number of bytes: ``4GiB`` and ``4G`` are 4 * 2**30, ``512MB`` is 512 * 10**6.

    Raises:
        InvalidRequestError: Not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(str(value))
    if match is not None:
        number, unit = match[1], match[2].lower()
        prefix, suffix = unit[:1].rstrip("b"), unit.removeprefix(unit[:1].rstrip("b"))
        if prefix in _POWERS and suffix in ("", "b", "ib") and not (suffix == "ib" and not prefix):
            base = 1000 if suffix == "b" and prefix else 1024
            size = int(float(number) * base ** _POWERS[prefix])
            if size >= 1:
                return size
    raise InvalidRequestError(
        "size", f"{value!r} is not a number of bytes above 0", hint="write 4GiB, 512MB or 1000000"
    )


def _plain(kind: Any) -> Any:
    return {int | None: int, str | None: str}.get(kind, kind)


def _whole_number(value: str | int) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a whole number") from error


def _number(value: str | float) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a number") from error


def size_argument(value: str | int) -> int:
    """What a flag that takes a size gives typer: ``parse_size`` with typer's own error."""
    try:
        return parse_size(value)
    except InvalidRequestError as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise typer.BadParameter(f"{message}; {error.hint}") from error


MODEL_FLAG = Flag(
    "model_flag",
    "Model to use; the first argument is then the prompt.",
    str | None,
    name="model",
    short="-m",
)

ENGINE_FLAGS = (
    Flag("revision", "Branch, tag or commit of a Hugging Face model.", str | None),
    Flag("offline", "Never use the network, as with HF_HUB_OFFLINE=1.", bool),
    Flag("trust_remote_code", "Run Python code that comes with the model.", bool),
    Flag("dtype", "Type of the weights: auto, float16, bfloat16 or float32.", str),
    Flag("block_size", "Tokens in one block: 8, 16, 32 or 64.", int),
    Flag("num_blocks", "Blocks in the pool; overrides --kv-cache-memory.", int | None),
    Flag(
        "kv_cache_memory",
        "Memory for the pool, such as 4GiB.",
        int | None,
        parser=size_argument,
        metavar="SIZE",
    ),
    Flag("gpu_memory_utilization", "Share of memory for weights and pool, up to 1.", float),
    Flag("max_model_len", "Longest prompt plus output in tokens.", int | None),
    Flag("max_num_seqs", "Most sequences in one step.", int),
    Flag("max_num_batched_tokens", "Token budget of one step.", int),
    Flag(
        "prefill_chunk_size",
        "Most tokens of one prompt in one step; unset: up to a whole step, 512 on the CPU.",
        int | None,
    ),
    Flag(
        "max_stream_gap_ms",
        "Milliseconds that prompts may keep a stream waiting; 0: any, serve and chat: 250.",
        int | None,
    ),
    Flag("enable_prefix_caching", "Share the blocks of equal prompt beginnings.", bool),
    Flag("kv_cache_dtype", "Type of the pool: auto, float16, bfloat16 or float32.", str),
    Flag("attention_backend", "auto, kernels, gather or reference.", str),
    Flag(
        "idle_release_s",
        "Seconds after which unused blocks' memory is given back; 0: never.",
        float,
    ),
    Flag("max_overtakes", "How often later requests may pass one that doesn't fit.", int),
    Flag("max_num_waiting", "Most requests that may wait; no limit unless given.", int | None),
    Flag("pool_fill", "Fill the pool with this at the start, such as nan; for tests.", float),
    Flag("check_integrity", "Check every invariant after every step; for tests.", bool),
)

SAMPLING_FLAGS = (
    # Greedy, unlike the API's 1.0: a command that is run twice should answer the same.
    Flag("temperature", "0 takes the most likely token; higher is wilder.", float, 0.0, "temp"),
    Flag("top_p", "Sample from the likeliest tokens up to this probability.", float),
    Flag("top_k", "Sample from this many likeliest tokens; 0 is off.", int),
    Flag("min_p", "Drop tokens less likely than this times the likeliest.", float),
    Flag("repetition_penalty", "Above 1, tokens that came before are less likely.", float),
    Flag("presence_penalty", "Above 0, tokens of the output are less likely, -2 to 2.", float),
    Flag("frequency_penalty", "The same for each time that they came, -2 to 2.", float),
    Flag("max_tokens", "Most tokens to generate.", int),
    Flag("min_tokens", "Don't stop before this many.", int),
    Flag("seed", "Makes sampled output reproducible.", int | None),
    Flag("n", "Candidate outputs for each prompt.", int),
    Flag("stop", "End the output before this text; repeatable.", list[str], [], metavar="TEXT"),
    Flag("ignore_eos", "Go on after the model's end token.", bool),
)

SHARED_FLAGS = (MODEL_FLAG, *ENGINE_FLAGS, *SAMPLING_FLAGS)


def with_engine_and_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared flags.

    The command declares ``ctx``, ``config: EngineConfig``, ``params: SamplingParams`` and
    ``model_flag`` beside its own parameters; typer sees a parameter for every flag instead.
    """
    groups = (
        FlagGroup("config", EngineConfig, ENGINE_FLAGS),
        FlagGroup("params", SamplingParams, SAMPLING_FLAGS),
    )
    return with_flags(command, groups, MODEL_FLAG)


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags that fill one settings object of a command.

    Attributes:
        parameter: The command's parameter that gets the object.
        cls: Its class; it has the defaults and the checks.
        flags: One for each of its fields that can be set.
    """

    parameter: str
    cls: type
    flags: tuple[Flag, ...]


def with_flags(
    command: Callable[..., None], groups: tuple[FlagGroup, ...], *single: Flag
) -> Callable[..., None]:
    """Replace parameters of a command by the flags that they are made of; typer sees only those.

    Args:
        command: Declares ``ctx``, a parameter for each group and for each single flag.
        groups: Settings objects.
        single: Flags that are parameters by themselves.
    """
    own = inspect.signature(command, eval_str=True)
    replaced = {group.parameter for group in groups} | {flag.field for flag in single}
    parameters = [p for name, p in own.parameters.items() if name not in replaced]
    parameters += [flag.parameter(None) for flag in single]
    for group in groups:
        defaults = {field.name: field.default for field in dataclasses.fields(group.cls)}
        parameters += [
            flag.parameter(defaults[flag.field] if flag.default is None else flag.default)
            for flag in group.flags
        ]

    def run(ctx: typer.Context, **values: Any) -> None:
        if _source("stop", ctx) == "ENVIRONMENT":
            # Typer would split it at spaces; a stop string may well have some.
            values["stop"] = [os.environ["PAGEDMLX_STOP"]]
        with _named_as_given(ctx):
            built = {
                group.parameter: group.cls(**{f.field: values.pop(f.field) for f in group.flags})
                for group in groups
            }
            command(ctx, **built, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    signature = own.replace(parameters=parameters)
    run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@contextmanager
def _named_as_given(ctx: typer.Context) -> Iterator[None]:
    """Errors about a setting name the flag, variable or key that it came from."""
    try:
        yield
    except InvalidRequestError as error:
        name = origin(error.field, ctx)
        if name is None:
            raise
        message = str(error).removeprefix(f"{error.field}: ")
        raise InvalidRequestError(name, message, hint=error.hint) from error


def origin(field: str, ctx: typer.Context) -> str | None:
    """Where a setting came from, as the user wrote it: a flag, a variable or a key.

    Args:
        field: The setting, which is the name of the command's parameter.
        ctx: Of the command that has it.

    Returns:
        None when no flag of the command fills that setting.
    """
    option = next((each for each in _options(ctx.command) if each.name == field), None)
    if option is None:
        return None
    source = _source(field, ctx)
    if source == "ENVIRONMENT":
        return str(option.envvar)
    return f"{_key(option)} in the config file" if source == "DEFAULT_MAP" else f"--{_key(option)}"


def given_fields(ctx: typer.Context) -> frozenset[str]:
    """Sampling settings that a flag, a variable or the config file gives."""
    return frozenset(f.field for f in SAMPLING_FLAGS if _source(f.field, ctx) != "DEFAULT")


def _source(field: str, ctx: typer.Context) -> str:
    # By its name, since typer keeps the enumeration private.
    return getattr(ctx.get_parameter_source(field), "name", "")


def _options(command: Any) -> list[Any]:
    """A command's flags; those that only tell something, such as --help, are left out."""
    options = [each for each in command.params if each.param_type_name == "option"]
    return [each for each in options if not each.is_eager]


def _key(option: Any) -> str:
    return next(name for name in option.opts if name.startswith("--")).removeprefix("--")


def give_variables(command: Any) -> None:
    """Let every flag of a command, and of its subcommands, be set in the environment."""
    for option in _options(command):
        option.envvar = option.envvar or _variable(_key(option))
    for subcommand in getattr(command, "commands", {}).values():
        give_variables(subcommand)


def _variable(key: str) -> str:
    return f"PAGEDMLX_{key.replace('-', '_').upper()}"


def config_defaults(
    settings: Mapping[str, object],
    command: Any,
    others: Iterable[Any] = (),
    flags: Iterable[Flag] = SHARED_FLAGS,
) -> dict[str, object]:
    """Turn a config file's keys into defaults of a command's parameters.

    Args:
        settings: Keys and values.
        command: Whose parameters they are.
        others: Commands that read the same file; what only they know is passed over.
        flags: What is known of the command's flags.

    Raises:
        InvalidRequestError: A key that no flag has, or a value of the wrong type.
    """
    by_key = {_key(option): option for option in _options(command)}
    elsewhere = {_key(option) for other in others for option in _options(other)}
    kinds = {flag.field: flag for flag in flags}
    defaults: dict[str, object] = {}
    for key, value in settings.items():
        option = by_key.get(key.replace("_", "-"))
        if option is None and key.replace("_", "-") in elsewhere:
            continue
        if option is None:
            import difflib

            close = difflib.get_close_matches(key, by_key, n=1)
            raise InvalidRequestError(
                f"{key} in the config file",
                "there is no flag of that name",
                hint=f"did you mean {close[0]}?" if close else f"pagedmlx {command.name} --help",
            )
        if option.metavar == "JSON" and isinstance(value, dict):
            value = json.dumps(value)
        if not _fits(value, option, kinds.get(option.name)):
            raise InvalidRequestError(
                f"{_key(option)} in the config file", f"{value!r} is of the wrong type"
            )
        defaults[option.name] = value
    return defaults


def _fits(value: object, option: Any, flag: Flag | None) -> bool:
    kind = flag.type if flag is not None else bool if option.is_flag else str
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if flag is not None and flag.parser is not None:
        return isinstance(value, int | str)
    wanted = {float: int | float, str: str, int: int}[_plain(kind)]
    return isinstance(value, wanted)

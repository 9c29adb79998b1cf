"""Strict check of a Metal source: clang with real address spaces, and what Metal limits or forbids.

What clang allows and Metal doesn't is found in clang's syntax tree or by pattern: casts across
address spaces, unqualified pointers, implicit conversions to bfloat. Not seen: registers,
occupancy, and overloads of Metal's library that the shim lacks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tests.metal.clang import run_clang, shim_flags
from tests.metal.source import Kernel, parse, translate

MAX_BUFFERS = 31
MAX_THREADGROUP_BYTES = 32 << 10
MAX_SOURCE_BYTES = 16 << 10  # MLX hashes the text at every call

_FLAGS = [
    "-std=c++14", "-DSTRICT", "-ferror-limit=30", "-fno-color-diagnostics",
    "-fno-caret-diagnostics", "-Wno-everything", "-Wimplicit-float-conversion",
    "-Wc++17-extensions", "-Wdeprecated-declarations", "-Wuninitialized", "-Wunused-value",
    "-Werror=c++11-narrowing", "-Werror=return-type", "-Xclang", "-cl-single-precision-constant",
]  # fmt: skip
_MESSAGE = re.compile(r"^kernel:(\d+):(\d+): (error|warning): (.*)$", re.M)
_MEASURED = re.compile(r"'msl_measure<(\d+)[UL]*>' is deprecated")
_NARROWED = re.compile(r"implicit conversion loses floating-point precision: .* to '(.*?)'")
# Without such a text there is no C-style cast to a pointer.
_POINTER_CAST = re.compile(r"\*\s*(?:const\s*)?\)")
_SPACES = r"device|constant|threadgroup|thread"
_TYPES = (
    r"(?:bool|void|float16_t|bfloat16_t|size_t|atomic_\w+|u?int(?:8|16|32|64)_t"
    r"|(?:half|bfloat|float|u?char|u?short|u?int|u?long)[234]?|vec\s*<[^<>;]*>)"
)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding; `line` counts from 1 in the source, 0 means the whole of it."""

    severity: Literal["error", "warning"]
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.line}: {self.severity}: {self.message}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found and measured."""

    diagnostics: tuple[Diagnostic, ...]
    num_buffers: int
    threadgroup_bytes: int
    source_bytes: int

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that Metal would refuse, or that break one of its limits."""
        return tuple(d for d in self.diagnostics if d.severity == "error")


def check(text: str, max_source_bytes: int = MAX_SOURCE_BYTES) -> Report:
    """Check a source as `mx.fast.metal_kernel` generates it."""
    kernel = parse(text)
    program = "\n".join(
        (
            "template <size_t BYTES> [[deprecated]] inline void msl_measure() {}",
            '#line 1 "kernel"',
            translate(kernel),
            '#line 1 "instance"',
            f"auto* msl_instance = &{kernel.instance};",
        )
    )
    flags = [*shim_flags(*_FLAGS), "-fsyntax-only"]
    if _POINTER_CAST.search(text):
        # The syntax tree says which casts cross; it takes as long as the rest.
        flags += ["-Xclang", "-ast-dump", "-Xclang", f"-ast-dump-filter={kernel.name}"]
    tree = run_clang(flags, program)
    diagnostics, threadgroup_bytes = _read_messages(tree.stderr)
    if tree.returncode and not any(d.severity == "error" for d in diagnostics):
        place = re.search(r"^kernel:(\d+)", tree.stderr, re.M)
        message = re.sub(r"\S*/shim/", "", tree.stderr.strip())
        diagnostics.append(Diagnostic("error", int(place.group(1)) if place else 0, message))
    diagnostics += _casts_across_spaces(tree.stdout)
    diagnostics += _unqualified_pointers(kernel)
    diagnostics += _stray_threadgroup_variables(kernel)
    diagnostics += _double_literals(text)
    source_bytes = len(text.encode())
    for value, limit, what in (
        (len(kernel.buffers), MAX_BUFFERS, "buffers"),
        (threadgroup_bytes, MAX_THREADGROUP_BYTES, "bytes of threadgroup memory"),
        (source_bytes, max_source_bytes, "bytes of source"),
    ):
        if value > limit:
            diagnostics.append(Diagnostic("error", 0, f"{value} {what}, limit {limit}"))
    diagnostics.sort(key=lambda d: d.line)
    return Report(tuple(diagnostics), len(kernel.buffers), threadgroup_bytes, source_bytes)


def _read_messages(output: str) -> tuple[list[Diagnostic], int]:
    diagnostics: list[Diagnostic] = []
    measures: dict[tuple[str, str], int] = {}  # by place: clang may report one twice
    for line, column, severity, message in _MESSAGE.findall(output):
        if measured := _MEASURED.search(message):
            measures[line, column] = int(measured.group(1))
            continue
        if narrowed := _NARROWED.search(message):
            # Metal converts to half by itself, but never to bfloat.
            severity = "error" if re.search("bf", narrowed.group(1)) else "warning"
        diagnostics.append(
            Diagnostic("error" if severity == "error" else "warning", int(line), message)
        )
    return list(dict.fromkeys(diagnostics)), sum(measures.values())


def _casts_across_spaces(tree: str) -> list[Diagnostic]:
    line = 0  # clang leaves out a line that is the last one it named
    found = []
    for node in tree.splitlines():
        named = [int(at) for at in re.findall(r"[\w.]+:(\d+):\d+", node)]
        begin = line if "<col:" in node or not named else named[0]
        if "CastExpr" in node and "<AddressSpaceConversion>" in node:
            found.append(Diagnostic("error", begin, "a cast to another address space"))
        line = named[-1] if named else line
    return list(dict.fromkeys(found))


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _without_comments(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)


def _unqualified_pointers(kernel: Kernel) -> list[Diagnostic]:
    text = _without_comments(kernel.text)
    names = re.findall(r"\b(?:typename|class|using|struct)\s+(\w+)", text)
    names += re.findall(r"\btypedef\s[^;]*?(\w+)\s*;", text)
    named = "|".join([_TYPES, *map(re.escape, names)])
    pattern = re.compile(
        rf"(?P<before>(?:\b(?:const|volatile|{_SPACES})\s+)*)\b(?:{named})"
        rf"(?P<after>(?:\s+(?:const|volatile|{_SPACES})\b)*)\s*(?P<kind>\*|\(?&(?!&))"
    )
    found = []
    for match in pattern.finditer(text):
        if not re.search(rf"\b(?:{_SPACES})\b", match["before"] + match["after"]):
            kind = "pointer" if "*" in match["kind"] else "reference"
            message = f"a {kind} without address space: {match.group().strip()}"
            found.append(Diagnostic("error", _line(text, match.start()), message))
    return found


def _stray_threadgroup_variables(kernel: Kernel) -> list[Diagnostic]:
    """Threadgroup variables that aren't plain declarations in the outermost block of the kernel."""
    text = _without_comments(kernel.text)
    found = []
    declared = re.compile(r"\bthreadgroup\s+(?:const\s+)?[\w:]+(?:\s*<[^;{}]*?>)?\s+\w+\s*[\[;=,{]")
    for match in declared.finditer(text):
        start, end = kernel.body
        inside = text[start : match.start()]
        outermost = start <= match.start() < end and inside.count("{") == inside.count("}")
        rest = text[match.start() : text.find(";", match.start())]
        if not outermost or re.search(r"[={,]", re.sub(r"<[^>]*>|\[[^\]]*\]", "", rest)):
            message = "a threadgroup variable must be declared alone, in the kernel's outer block"
            found.append(Diagnostic("error", _line(text, match.start()), message))
    return found


def _double_literals(text: str) -> list[Diagnostic]:
    clean = _without_comments(text)
    literal = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?(?![\w.])")
    return [
        Diagnostic(
            "warning", _line(clean, m.start()), f"{m.group()} is a double where doubles exist"
        )
        for m in literal.finditer(clean)
    ]

"""Planted faults: a named change of a kernel's source, and which rung of the proof catches it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from pagedmlx.ops.launch import Kernel, Launch, Launcher, Platform
from tests.metal.check import check
from tests.metal.execute import ExecutionError
from tests.metal.launcher import FiberLauncher

STRICT_CHECK = "strict check"
WRONG_RESULT = "result"


class Checkable(Protocol):
    """Something that kernels compute."""

    def deviation(self, launcher: Launcher) -> float:
        """Largest error, as a share of the tolerance."""
        ...


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault: `old` becomes `new` wherever it stands in the sources of one kernel.

    Attributes:
        kernel: First word of the kernel's file, such as decode.
        fault: What it is, in words.
        old: Text of the source; it must be there.
        new: What it becomes.
    """

    kernel: str
    fault: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.fault}"

    def changes(self, kernel: Kernel) -> bool:
        """Whether it is about this kernel."""
        return kernel.name.startswith(f"paged_{self.kernel}")


def mutate(source: str, mutations: Iterable[Mutation]) -> Iterator[tuple[str, str]]:
    """Each fault's name, and the source with it.

    Raises:
        ValueError: The source lacks a fault's text, so that the fault would test nothing.
    """
    for mutation in mutations:
        if mutation.old not in source:
            raise ValueError(f"{mutation}: the source has no {mutation.old!r}")
        yield str(mutation), source.replace(mutation.old, mutation.new)


@dataclass
class MutatingLauncher:
    """FiberLauncher with a fault in one kernel; notes whether the strict check sees it.

    Attributes:
        mutation: The fault.
        refused: Whether the strict check refused a changed source.
        changed: Launches of a changed source.
    """

    mutation: Mutation
    refused: bool = False
    changed: int = 0
    platform: Platform = Platform.METAL
    _fibers: FiberLauncher = field(init=False)

    def __post_init__(self) -> None:
        self._fibers = FiberLauncher(change=self._change, rounded=True)

    def __call__(self, launch: Launch) -> list[mx.array]:
        """See ``Launcher``."""
        return self._fibers(launch)

    def view(self, pool: mx.array) -> mx.array:
        """See ``Launcher.view``."""
        return self._fibers.view(pool)

    def _change(self, kernel: Kernel, source: str) -> str:
        if not self.mutation.changes(kernel):
            return source
        ((_, changed),) = mutate(source, [self.mutation])
        self.changed += 1
        self.refused = self.refused or bool(check(changed).errors)
        return changed


def caught_by(mutation: Mutation, variant: Checkable, max_deviation: float) -> list[str]:
    """The rungs that see a fault in a variant: the strict check, and a report or a wrong result.

    Raises:
        ValueError: The variant never launches the kernel.
    """
    launcher = MutatingLauncher(mutation)
    rungs = []
    try:
        if not variant.deviation(launcher) < max_deviation:
            rungs.append(WRONG_RESULT)
    except ExecutionError as error:
        rungs.append(error.kind)
    if not launcher.changed:
        raise ValueError(f"{variant} never launches {mutation.kernel}")
    return [STRICT_CHECK, *rungs] if launcher.refused else rungs

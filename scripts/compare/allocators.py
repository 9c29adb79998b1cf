"""Contiguous memory, handed out in one piece: by buddies as in the paper, or first fit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Region:
    """Slots [start, start + granted)."""

    start: int
    granted: int


class Allocator(Protocol):
    """Gives regions and takes them back.

    Attributes:
        num_free: Slots in no region.
    """

    num_free: int

    def try_allocate(self, size: int) -> Region | None:
        """A region of at least ``size`` slots, or None when no hole is that large."""
        ...

    def free(self, region: Region) -> None:
        """Take a region back."""
        ...


class BuddyAllocator:
    """Powers of two that split and merge (Knowlton, 1965); what the paper assumes of Orca.

    Args:
        num_slots: All memory; what is no power of two is used as several of them.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._holes: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._holes[order].add(start)
                start += 1 << order

    def try_allocate(self, size: int) -> Region | None:
        """A region of the next power of two."""
        order = (size - 1).bit_length()
        fitting = [each for each in range(order, len(self._holes)) if self._holes[each]]
        if not fitting:
            return None
        start = min(self._holes[fitting[0]])
        self._holes[fitting[0]].remove(start)
        for half in range(fitting[0] - 1, order - 1, -1):
            self._holes[half].add(start + (1 << half))
        self.num_free -= 1 << order
        return Region(start, 1 << order)

    def free(self, region: Region) -> None:
        """Take a region back and merge it with its free buddies."""
        self.num_free += region.granted
        start, order = region.start, region.granted.bit_length() - 1
        while order + 1 < len(self._holes) and (buddy := start ^ 1 << order) in self._holes[order]:
            self._holes[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._holes[order].add(start)


class FirstFitAllocator:
    """The first hole that is large enough, cut to size.

    Args:
        num_slots: All memory.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._holes = [(0, num_slots)]

    def try_allocate(self, size: int) -> Region | None:
        """A region of exactly ``size`` slots."""
        for index, (start, length) in enumerate(self._holes):
            if length >= size:
                self._holes[index : index + 1] = (
                    [(start + size, length - size)] if length > size else []
                )
                self.num_free -= size
                return Region(start, size)
        return None

    def free(self, region: Region) -> None:
        """Take a region back and merge it with the holes beside it."""
        self.num_free += region.granted
        start, end = region.start, region.start + region.granted
        index = bisect.bisect(self._holes, (start, 0))
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, end - start))

"""DemoClient: answers that were written beforehand, over a pool of words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping

from pagedmlx.chat.client import ChatRequest, Delta
from pagedmlx.chat.demo_pool import DemoPool, DemoSequence
from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.progress import ProgressCallback

_WORD = re.compile(r"\s*\S+|\s+$")

SKY = """<think>
Short, and the reason first.
</think>

Sunlight is a mix of all colours. On its way down it meets molecules of air, and these scatter
**short waves far more than long ones**: the strength grows with the fourth power of the frequency.

| colour | wavelength | scattered |
|---|---|---|
| red | 700 nm | 1.0 |
| green | 530 nm | 3.0 |
| blue | 450 nm | 5.9 |

So blue light reaches your eye from every direction. At sunset the light comes a long way through
the air, most of the blue is gone, and what is left is red.
"""

PAGING = """A page table maps *logical* pages to *physical* ones. The same works for a KV cache:

```python
class BlockTable:
    def slot(self, position: int) -> int:
        block = self.block_ids[position // BLOCK_SIZE]
        return block * BLOCK_SIZE + position % BLOCK_SIZE
```

1. A sequence **grows** a block at a time, so at most one block is partly empty.
2. Equal beginnings **share** blocks; a count says how many tables hold each.
3. Who writes into a shared block gets a **copy** first.

Nothing is reserved for text that may never come.
"""

NAMES = (
    "**Tidepool**. Small, full of life, and filled anew twice a day. What lives in it makes do "
    "with the room that there is, and when the sea comes back nobody has to move house.",
    "**Lighthouse**. You see it from afar, it shows where you are, and it never asks who you are. "
    "One lamp serves every ship, and a ship more costs nothing.",
    "**Driftwood**. It has come a long way and carries what it has seen. No two pieces are alike, "
    "and yet every one of them began as a piece of the same kind of tree.",
    "**Kelp**. Grows half a metre a day, quietly, in the dark, and only as far as the water goes.",
)

OTHER = """That depends on what you compare it with. Three things are worth looking at:

- what it **costs** when nothing happens,
- what it costs when *everything* happens at once,
- and whether you can see which of the two it is.

The map on the side shows the third.
"""


class DemoClient:
    """A ``ChatClient`` that plays.

    Args:
        delay_s: Time between two words of an answer.
        num_blocks: Blocks in its pool.
        block_size: Words in one block.
    """

    def __init__(self, delay_s: float = 0.03, num_blocks: int = 96, block_size: int = 8) -> None:
        self.name = "demo"
        self.max_len: int | None = 1024
        self.notes: tuple[str, ...] = ("demo: these answers were written beforehand",)
        self.defaults: Mapping[str, float] = {}
        self.delay_s = delay_s
        self.pool = DemoPool(num_blocks, block_size)

    async def start(self, on_progress: ProgressCallback) -> None:
        """Nothing is to be loaded, and it takes a moment all the same."""
        for share in (0.3, 0.6, 1.0):
            on_progress("loading the demo", share)
            await asyncio.sleep(min(0.1, self.delay_s))

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        """Say what was written beforehand, word by word, all candidates at once."""
        prompt = [f"{m['role']} {word}" for m in request.messages for word in m["content"].split()]
        num = min(request.params.max_tokens or 1024, 1024)
        question = request.messages[-1]["content"]
        words = [_WORD.findall(_answer(question, index))[:num] for index in range(request.params.n)]
        sequences = [
            DemoSequence(
                request.request_id, index, list(prompt), len(prompt), len(prompt) + len(each)
            )
            for index, each in enumerate(words)
        ]
        began_s = asyncio.get_running_loop().time()
        self.pool.add(sequences)
        left = list(sequences)
        try:
            while not sequences[0].is_running:
                await asyncio.sleep(self.delay_s)
            ttft_s = asyncio.get_running_loop().time() - began_s + self.delay_s
            for place in range(max(map(len, words))):
                await asyncio.sleep(self.delay_s)
                for each in [each for each in left if place < len(words[each.index])]:
                    word = words[each.index][place]
                    # As the same words in the next prompt, so that they are found again.
                    if word.strip():
                        self.pool.grow(each, f"assistant {word.strip()}")
                    ends = place + 1 == len(words[each.index])
                    yield Delta(
                        index=each.index,
                        text=word,
                        finish="stop" if ends else None,
                        num_prompt_tokens=len(prompt),
                        num_cached_tokens=sequences[0].num_cached_tokens,
                        num_output_tokens=place + 1,
                        ttft_s=ttft_s,
                    )
                    if ends:
                        left.remove(each)
                        self.pool.remove(each)
        finally:
            for each in left:
                self.pool.remove(each)

    async def snapshot(self) -> EngineSnapshot | None:
        """Who holds which words."""
        return self.pool.snapshot()

    async def close(self) -> bool:
        """Nothing is left behind."""
        return True


def _answer(question: str, index: int) -> str:
    wanted = question.lower()
    for word, answer in (("sky", SKY), ("pag", PAGING)):
        if word in wanted:
            return answer
    return NAMES[index % len(NAMES)] if "name" in wanted else OTHER

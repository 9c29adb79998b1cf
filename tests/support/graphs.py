"""What MLX has still to compute."""

from __future__ import annotations

import io
import re
from collections import Counter

import mlx.core as mx


def operations(*outputs: mx.array) -> Counter[str]:
    """How often each operation is in what is still to be computed for these arrays."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return Counter(re.findall(r'\[label ="(\w+)", shape=rectangle\]', graph.getvalue()))

"""How long ``pagedmlx --help`` takes: each of ten runs in a process of its own, and their median.

python scripts/bench_help.py --json report.json     # "-" prints the report
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from report import add_json_option, save

REPOSITORY = Path(__file__).resolve().parents[1]


def help_s() -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pagedmlx", "--help"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    add_json_option(parser, required=False)
    options = parser.parse_args()
    seconds = [help_s() for _ in range(options.runs)]
    print(f"pagedmlx --help: median of {options.runs}: {median(seconds):.3f} s", file=sys.stderr)
    if options.json:
        save({"median_s": median(seconds), "seconds": seconds}, options.json)


if __name__ == "__main__":
    main()

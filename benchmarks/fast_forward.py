"""What entering an epoch at a far position costs, beside what the sampler itself needs to begin.

    python -m benchmarks.fast_forward             10^7 items, batches of 4, position 10^6
    python -m benchmarks.fast_forward --quick     a tenth of it

The contenders take turns. `begin` is the time that a shuffled BatchSampler needs to its first batch; `resume` is the
same through `FastForwardSampler` at the position; `iterate` walks there batch by batch, as a loop that skips would.
Seconds are the process's CPU time. Prints JSON with minimum, median and the ratio (resume - begin) / begin, and the
growth of the peak memory that resuming adds to beginning, in MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from lightning_resume import FastForwardSampler

BATCH_SIZE = 4


def seconds(first_batch: Callable[[], Any]) -> float:
    """CPU time until the first batch is there."""
    begun = time.process_time()
    first_batch()
    return time.process_time() - begun


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    num_items, position = (10**6, 10**5) if args.quick else (10**7, 10**6)

    def shuffled() -> BatchSampler:
        return BatchSampler(RandomSampler(range(num_items)), BATCH_SIZE, drop_last=True)

    torch.manual_seed(0)
    begun = FastForwardSampler(shuffled())
    next(iter(begun))
    state = begun.state_dict(position=0)
    state["position"] = position

    def resumed() -> Iterator[Any]:
        sampler = FastForwardSampler(shuffled())
        sampler.load_state_dict(state)
        return iter(sampler)

    contenders: dict[str, Callable[[], Any]] = {
        "begin": lambda: next(iter(shuffled())),
        "resume": lambda: next(resumed()),
        "iterate": lambda: next(islice(iter(shuffled()), position, None)),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    contenders["begin"]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contenders["resume"]()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    for _ in range(args.rounds):
        for name, contender in contenders.items():
            times[name].append(seconds(contender))
    median = {name: statistics.median(values) for name, values in times.items()}
    report = {
        "num_items": num_items,
        "position": position,
        "minimum_seconds": {name: round(min(values), 4) for name, values in times.items()},
        "median_seconds": {name: round(value, 4) for name, value in median.items()},
        "added_ratio": round((median["resume"] - median["begin"]) / median["begin"], 3),
        "added_peak_mb": round(grown / 1024, 1),
        "torch": torch.__version__,
    }
    print(json.dumps(report, indent=2))
    return 0 if report["added_ratio"] <= 0.5 else 1


if __name__ == "__main__":
    raise SystemExit(main())

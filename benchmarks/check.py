"""Compares the ratios of ``benchmarks.floor`` and ``benchmarks.peers`` with those kept in kept.json.

``make bench-check`` fails if a ratio is worse by more than 15 %. ``make bench-check RENEW=1`` keeps what it measures.
Ratios to what is measured in the same run vary little between machines, while durations do.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import floor, peers
from benchmarks.harness import Metric, report

KEPT = Path(__file__).resolve().parent / "kept.json"
TOLERANCE = 0.15
Ratios = dict[str, dict[str, float]]


BENCHMARKS: dict[str, Callable[[int, int], list[Metric]]] = {
    "floor": floor.measure,
    "langgraph": lambda runs, rounds: peers.metrics(*peers.measure(["langgraph"], runs, rounds)),
}


def ratios(metrics: Sequence[Metric]) -> dict[str, float]:
    """The ratios that are guarded, by name."""
    return {metric.name: round(metric.ratio, 3) for metric in metrics if metric.better and metric.ratio is not None}


def differences(kept: Mapping[str, float], metrics: Sequence[Metric]) -> tuple[list[str], list[str]]:
    """What is worse than the kept ratios by more than TOLERANCE, and what is better by more, as sentences.

    A ratio that is only kept, or only measured, is worse: the kept ones must be renewed with the benchmark.
    """
    measured, directions = ratios(metrics), {metric.name: metric.better for metric in metrics}
    worse = [f"{name}: kept, but not measured" for name in kept if name not in measured]
    better: list[str] = []
    for name, ratio in measured.items():
        if name not in kept:
            worse.append(f"{name}: measured, but not kept")
            continue
        change = ratio / kept[name] - 1
        if abs(change) > TOLERANCE:
            sentence = f"{name}: {ratio:.2f}, kept {kept[name]:.2f} ({change:+.0%}; {directions[name]} is better)"
            (worse if (change > 0) == (directions[name] == "lower") else better).append(sentence)
    return worse, better


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.add_argument("--renew", action="store_true", help="keep the measured ratios instead of comparing them")
    parser.add_argument("--runs", type=int, default=400, help="runs of a round (default 400)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, by turns (default 5)")
    given = parser.parse_args(arguments)
    measured = {name: benchmark(given.runs, given.rounds) for name, benchmark in BENCHMARKS.items()}
    for name, metrics in measured.items():
        report(name, metrics)
    if given.renew:
        kept: Ratios = {name: ratios(metrics) for name, metrics in measured.items()}
        KEPT.write_text(json.dumps(kept, indent=2) + "\n")
        print(f"\nThe ratios are kept in {KEPT.name}.")
        return
    kept, found = json.loads(KEPT.read_text()), []
    for name, metrics in measured.items():
        worse, better = differences(kept.get(name, {}), metrics)
        found += worse
        print(*[f"WORSE   {name}: {text}" for text in worse], *[f"better  {name}: {text}" for text in better], sep="\n")
    if found:
        sys.exit(f"At least one ratio is worse than the kept one by more than {TOLERANCE:.0%}.")
    print(f"No ratio is worse than the kept one by more than {TOLERANCE:.0%}.")


if __name__ == "__main__":
    main(sys.argv[1:])

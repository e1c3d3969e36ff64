"""This service beside other agent servers: the same load by turns, from one client, on the same machine.

``make bench-peers``, or ``python -m benchmarks.peers --runs 400 --rounds 5 --json FILE``. It starts all servers itself,
and installs the pinned peers under var/peers/ once.
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    Connection,
    Metric,
    document,
    milliseconds,
    percentile,
    ratio_by_rounds,
    report,
    wait_until,
)
from benchmarks.installed import Missing, environment_of, version_of
from benchmarks.sides import ASSISTANT, AgentProtocol, Side, read, service, start_runs
from tests.stack.postgres import PostgresServer, create_database
from tests.stack.process import Process, free_port, remove_directory, temporary_directory
from tests.stack.redis import RedisServer

GRAPH = Path(__file__).resolve().parent / "pins" / "graph.py"
START_SECONDS = 120
# The numbers of clients, and the shares of the runs that one client starts. One client takes longer for each.
CLIENTS = {16: 1.0, 1: 0.25}
WARM_RUNS, RUNS, ROUNDS = 400, 400, 5
READS_PER_RUN = 1.5
# Of the ratios of the medians.
TARGETS = {("POST run", 16): "p50 ≤ 2.5", ("GET run", 16): "p50 ≤ 1.5", ("GET run", 1): "p50 ≤ 2.0"}


# --- the peers -------------------------------------------------------------------------------------------------------


@contextmanager
def running(
    name: str,
    arguments: Sequence[str],
    health: str,
    environment: Mapping[str, str] | None = None,
    servers: Mapping[str, Process] | None = None,
) -> Iterator[AgentProtocol]:
    """A peer in a directory of its own, from the moment at which ``health`` answers."""
    programs, port = environment_of(name), free_port()
    folder = temporary_directory(f"{name}-")
    (folder / f"{name}.json").write_text(json.dumps({"dependencies": ["."], "graphs": {ASSISTANT: f"{GRAPH}:graph"}}))
    # The peers take settings from variables with the names of the service's own. They work offline.
    left_out = ("_proxy", "database_url", "redis_url")
    variables = {key: value for key, value in os.environ.items() if not key.lower().endswith(left_out)}
    variables |= {"LANGSMITH_TRACING": "false", "LANGGRAPH_CLI_NO_ANALYTICS": "1", "PYTHONUNBUFFERED": "1"}
    process = Process(
        name,
        [str(programs / name), *arguments, "--host", "127.0.0.1", "--port", str(port)],
        log=folder / "log",
        environment=variables | {"PORT": str(port), **(environment or {})},
        directory=folder,
    )
    process.start()

    def answers() -> bool:
        process.check()
        try:
            return Connection(port).request("GET", health)[0] == 200
        except OSError:
            return False

    try:
        wait_until(answers, START_SECONDS, 0.2)
        yield AgentProtocol(version_of(name), port, {name: process, **(servers or {})})
    finally:
        process.kill()
        remove_directory(folder)


def langgraph() -> AbstractContextManager[Side]:
    """LangGraph's server for development. It keeps everything in memory, and executes ten runs at the same time."""
    arguments = ["dev", "--no-browser", "--no-reload", "--n-jobs-per-worker", "10"]
    return running("langgraph", arguments, "/ok")


@contextmanager
def aegra() -> Iterator[Side]:
    """Aegra with its workers, on PostgreSQL and Redis of its own."""
    with PostgresServer(durable=True) as postgres, RedisServer() as redis:
        variables = {
            "DATABASE_URL": create_database(postgres.url()),
            "REDIS_BROKER_ENABLED": "true",
            "REDIS_URL": redis.url(),
        }
        servers = {"PostgreSQL": postgres, "Redis": redis}
        with running("aegra", ["serve"], "/health", variables, servers) as side:
            yield side


PEERS: dict[str, Callable[[], AbstractContextManager[Side]]] = {"langgraph": langgraph, "aegra": aegra}
# It becomes slower with what it keeps, so each round has one of its own.
FRESH = {"langgraph"}


# --- the measurement -------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What the rounds measured on one side. ``posts`` and ``reads`` are seconds, by number of clients and round."""

    name: str
    rates: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)
    posts: dict[int, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[int, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def totals(self) -> list[float]:
        """CPU milliseconds per run of all processes, in each round."""
        return [sum(each.values()) for each in self.cpu]


def one_round(side: Side, measured: Measured, runs: int) -> None:
    for clients, share in CLIENTS.items():
        load = start_runs(side, max(clients, round(runs * share)), clients)
        if clients == max(CLIENTS):
            measured.rates.append(load.rate)
            measured.seen.append(load.seen)
            measured.cpu.append(load.cpu)
        measured.posts[clients].append(load.posts)
        measured.reads[clients].append(read(side.port, load.runs, round(runs * share * READS_PER_RUN), clients))


def installed(names: Sequence[str]) -> list[str]:
    """Those of the peers that can be installed here. For each of the others, one line says why it is left out."""
    found = []
    for name in names:
        try:
            environment_of(name)
        except Missing as error:
            print(f"{version_of(name)} is left out: {error}", flush=True)
        else:
            found.append(name)
    return found


def measure(
    names: Sequence[str] = tuple(PEERS), runs: int = RUNS, rounds: int = ROUNDS, warm: int = WARM_RUNS
) -> list[Measured]:
    """This service first, then the peers that can be installed here, of which there must be one."""
    names = installed(names)
    if not names:
        sys.exit("There is no peer to compare with.")
    found = [Measured("this service"), *(Measured(version_of(name)) for name in names)]
    with ExitStack() as servers:

        @contextmanager
        def begun(start: Callable[[], AbstractContextManager[Side]]) -> Iterator[Side]:
            with start() as side:
                start_runs(side, warm, max(CLIENTS))
                yield side

        starts = {"this service": service, **{name: PEERS[name] for name in names}}
        kept = {name: servers.enter_context(begun(start)) for name, start in starts.items() if name not in FRESH}
        for _ in range(rounds):
            for (name, start), measured in zip(starts.items(), found, strict=True):
                with nullcontext(kept[name]) if name in kept else begun(start) as side:
                    one_round(side, measured, runs)
                    measured.memory = side.memory()
    return found


def metrics(ours: Measured, peer: Measured) -> list[Metric]:
    """One line for each figure that both sides have."""
    both, cpu = (ours, peer), [side.totals for side in (ours, peer)]
    memory = [sum(side.memory.values()) for side in (ours, peer)]
    return [
        rate("runs/s, POST to completed", [side.rates for side in both], "≥ 1.5"),
        rate("runs/s, as a client sees it", [side.seen for side in both], "≥ 1.2"),
        *(latency("POST run", clients, ours.posts[clients], peer.posts[clients]) for clients in CLIENTS),
        *(latency("GET run", clients, ours.reads[clients], peer.reads[clients]) for clients in CLIENTS),
        line(
            "CPU per run of all processes",
            [f"{statistics.median(rounds):.1f} ms" for rounds in cpu],
            ratio_by_rounds(*cpu),
        ),
        line("memory of all processes", [f"{size / 2**20:.0f} MiB" for size in memory], memory[0] / memory[1]),
    ]


def line(name: str, texts: list[str], ratio: float, target: str = "", better: str = "lower") -> Metric:
    measured, baseline = texts
    return Metric(name, measured, baseline, ratio, target, better)


def rate(name: str, rates: list[list[float]], target: str) -> Metric:
    texts = [f"{statistics.median(rounds):.0f}/s" for rounds in rates]
    return line(name, texts, ratio_by_rounds(*rates), target, "higher")


def latency(what: str, clients: int, ours: list[list[float]], peer: list[list[float]]) -> Metric:
    """The percentiles of all rounds. The ratio is that of the medians."""
    name = f"{what}, {clients} client{'s' if clients > 1 else ''}"
    texts = [milliseconds(list(chain(*rounds))) for rounds in (ours, peer)]
    ratio = ratio_by_rounds(*([statistics.median(seconds) for seconds in rounds] for rounds in (ours, peer)))
    return line(name, texts, ratio, TARGETS.get((what, clients), ""))


def processes(side: Measured) -> list[Metric]:
    """CPU per run and memory of each process."""
    return [
        Metric(
            name,
            f"{statistics.median(cpu[name] for cpu in side.cpu):.2f} ms per run, {side.memory[name] / 2**20:.0f} MiB",
        )
        for name in side.memory
    ]


def figures(side: Measured) -> dict[str, Any]:
    """The medians over the rounds, and percentiles over all rounds, as numbers."""

    def percentiles(values: dict[int, list[list[float]]]) -> dict[str, dict[str, float]]:
        flat = {clients: list(chain(*rounds)) for clients, rounds in values.items()}
        return {
            str(clients): {
                "p50": round(statistics.median(seconds) * 1000, 2),
                "p99": round(percentile(seconds, 0.99) * 1000, 2),
            }
            for clients, seconds in flat.items()
        }

    return {
        "name": side.name,
        "runs_per_second": round(statistics.median(side.rates), 1),
        "runs_per_second_seen": round(statistics.median(side.seen), 1),
        "post_ms_by_clients": percentiles(side.posts),
        "get_ms_by_clients": percentiles(side.reads),
        "cpu_ms_per_run": {name: round(statistics.median(cpu[name] for cpu in side.cpu), 2) for name in side.cpu[0]},
        "memory_mib": {name: round(size / 2**20) for name, size in side.memory.items()},
    }


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of a round, with 16 clients (default {RUNS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds, by turns (default {ROUNDS})")
    parser.add_argument("--warm", type=int, default=WARM_RUNS, help=f"runs before the rounds (default {WARM_RUNS})")
    parser.add_argument("--only", choices=PEERS, action="append", help="this peer only; can be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write tables and figures to a file")
    given = parser.parse_args(arguments)
    ours, *others = measure(given.only or tuple(PEERS), given.runs, given.rounds, given.warm)
    tables = [(f"{ours.name} beside {peer.name}", metrics(ours, peer)) for peer in others]
    tables += [(f"processes of {side.name}", processes(side)) for side in (ours, *others)]
    for title, lines in tables:
        report(title, lines)
    if given.json:
        found = {"tables": [document(*each) for each in tables], "sides": [figures(side) for side in (ours, *others)]}
        given.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""What a start costs: CPU and memory of each process, and a command beside a bare project's.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks startup``. It needs Linux.
"""

import os
import resource
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import Metric, cpu_seconds, family, report
from tests.driver import Driver
from tests.stack.process import ROOT, free_port, python
from tests.stack.stack import Stack

REPEATS = 9
RUNS = 100
MIB = 1024 * 1024
TARGETS = {"beat": 80, "maintenance": 80, "webhooks": 80, "runs-1": 110, "web": 120}
PYTHON = {"PYTHONDONTWRITEBYTECODE": ""}


def check_seconds(directory: Path, environment: Mapping[str, str]) -> float:
    """User and system time of ``manage.py check`` in ``directory``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = python("manage.py", "check")
    subprocess.run(command, cwd=directory, env=dict(environment), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(directory: Path) -> Metric:
    """``check`` here and in a project that ``startproject`` has made, by turns."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("DATABASE", "REDIS", "DJANGO"))
    }
    environment |= PYTHON | {"VAR_DIR": str(directory / "var")}
    bare = directory / "bare"
    bare.mkdir()
    subprocess.run(python("-m", "django", "startproject", "bare", str(bare)), check=True, env=environment)
    pairs = [(check_seconds(ROOT, environment), check_seconds(bare, environment)) for _ in range(REPEATS + 1)][1:]
    ours, bare_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    value, baseline = (f"{seconds * 1000:.0f} ms CPU" for seconds in (ours, bare_seconds))
    return Metric("manage.py check", value, baseline, ours / bare_seconds, "≤ 2.0")


def memory(pid: int) -> tuple[float, float]:
    """RSS and PSS, in MiB, of the largest process: the server's parent only starts and watches."""
    largest = max((process.memory_full_info() for process in family(pid)), key=lambda used: used.rss)
    return largest.rss / MIB, largest.pss / MIB


def load(stack: Stack) -> None:
    """Runs whose events go to a webhook."""
    port = free_port()
    stack.add("receiver", python("-m", "benchmarks.receiver", str(port)))
    session = stack.session()
    session.post("/webhooks", json={"url": f"http://127.0.0.1:{port}/instant"}).raise_for_status()
    driver = Driver(session)
    for _ in range(RUNS):
        driver.finish("Hello")


def main() -> None:
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    with tempfile.TemporaryDirectory() as directory:
        cache = PYTHON | {"PYTHONPYCACHEPREFIX": str(Path(directory) / "pyc")}
        os.environ |= cache
        metrics = [commands(Path(directory))]
        with Stack(**services, environment=cache) as stack:
            # beat says nothing when it is ready, but the first task that it sends is in its schedule's file.
            stack.wait_for(lambda: any(stack.directory.glob("celerybeat-schedule*")))
            cpu = {name: cpu_seconds([stack.processes[name].pid]) for name in TARGETS}
            idle = {name: memory(stack.processes[name].pid) for name in TARGETS}
            load(stack)
            busy = {name: memory(stack.processes[name].pid) for name in TARGETS}
    for name, target in TARGETS.items():
        text = f"{cpu[name]:.2f} s CPU; RSS {idle[name][0]:.0f}, PSS {idle[name][1]:.0f} MiB"
        after = f"after {RUNS} runs RSS {busy[name][0]:.0f}, PSS {busy[name][1]:.0f} MiB"
        metrics.append(Metric(name, f"{text}; {after}", target=f"≤ {target} MiB"))
    report("Start-up and memory", metrics)

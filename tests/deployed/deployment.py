"""The service as the Procfile defines it. The entry point of the container image starts each process."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.stack.process import ROOT, free_port, python
from tests.stack.stack import START_SECONDS, Stack, is_ready, worker_is_ready

SERVERS = ("web", "stream")
WORKERS = ("runs-1", "runs-2", "webhooks", "webhooks-retry", "maintenance")


class Deployment(Stack):
    """``database_url`` and ``redis_url`` are required. The processes connect to ``through`` as their database."""

    def __init__(self, *, through: str | None = None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.through = through
        self.stream_port = free_port()
        self.process_environment["stream"] = {"PORT": str(self.stream_port)}
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    @property
    def stream_url(self) -> str:
        return f"http://127.0.0.1:{self.stream_port}"

    def start_processes(self) -> None:
        assert self.redis_url
        released = subprocess.run(
            python("-m", "config.serve.procfile", "release"),
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert released.returncode == 0, released.stdout + released.stderr
        if self.through:
            name = self.environment["DATABASE_URL"].rpartition("/")[2]
            self.environment["DATABASE_URL"] = f"{self.through}/{name}"
        for name in (*SERVERS, *WORKERS, "beat"):
            self.add(name, python("-m", "config.serve.procfile", name.partition("-1")[0].partition("-2")[0]))
        self.wait_until_all_serve()

    def wait_until_all_serve(self) -> None:
        for name, process in self.processes.items():
            if name in SERVERS and process.wanted:
                url = self.url if name == "web" else self.stream_url
                self.wait_for(partial(is_ready, url), START_SECONDS, f"{url}'s readiness")
            elif name in WORKERS and process.wanted:
                self.wait_for(partial(worker_is_ready, process), START_SECONDS, f"readiness of {name}")

    def shut_down(self) -> dict[str, float]:
        """Send SIGTERM to every process at once, as a platform does. Returns the seconds that each took."""
        begun = time.monotonic()
        for process in self.processes.values():
            process.wanted = False
            process.send_signal(signal.SIGTERM)
        took: dict[str, float] = {}
        while len(took) < len(self.processes):
            assert time.monotonic() - begun < 60, f"still there: {set(self.processes) - set(took)}\n{self.report()}"
            for name, process in self.processes.items():
                if name not in took and not process.running:
                    took[name] = time.monotonic() - begun
            time.sleep(0.1)
        return took

    def start_again(self, *names: str) -> None:
        """Start those of the processes that ``shut_down`` ended."""
        for process in (self.processes[name] for name in names):
            process.log.replace(process.log.with_suffix(".before.log"))
            process.start()
        self.wait_until_all_serve()

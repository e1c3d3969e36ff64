"""``python -m tests.stack.run_services COMMAND …``: the command, with throw-away servers for it.

Their addresses are in TEST_DATABASE_URL and TEST_REDIS_URL. A variable that is set already is left alone, and no server
is started for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

from tests.stack.postgres import PostgresServer
from tests.stack.redis import RedisServer


def main(command: list[str]) -> int:
    if not command:
        sys.exit("usage: python -m tests.stack.run_services COMMAND [ARGUMENT …]")
    with ExitStack() as servers:
        environment = dict(os.environ)
        if not environment.get("TEST_DATABASE_URL"):
            environment["TEST_DATABASE_URL"] = servers.enter_context(PostgresServer()).url()
        if not environment.get("TEST_REDIS_URL"):
            environment["TEST_REDIS_URL"] = servers.enter_context(RedisServer()).url()
        try:
            return subprocess.run(command, env=environment, check=False).returncode
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m tests.stack.run_services COMMAND …``: run the command with temporary servers.

TEST_DATABASE_URL and TEST_REDIS_URL hold the addresses of the servers. If a variable is already set, it is unchanged
and no server is started for it.
"""

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

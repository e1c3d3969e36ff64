"""pytest loads this module before Django's settings. It gives each test run its own state directory and settings."""

import atexit
import os
import shutil
import tempfile

from tests.stack.redis import own_database

if "VAR_DIR" not in os.environ:
    os.environ["VAR_DIR"] = tempfile.mkdtemp(prefix="tests-")
    atexit.register(shutil.rmtree, os.environ["VAR_DIR"], ignore_errors=True)

if os.environ.get("TEST_DATABASE_URL"):
    os.environ["DATABASE_URL"] = os.environ["TEST_DATABASE_URL"]
if os.environ.get("TEST_REDIS_URL"):
    os.environ["REDIS_URL"] = own_database(os.environ["TEST_REDIS_URL"])
# The receivers and the model servers of the tests listen on loopback.
os.environ.setdefault("OUTBOUND_ALLOW_PRIVATE", "1")
# All tests request pages from one address.
os.environ.setdefault("RATE_LIMIT_PAGES", "0")
# A shared Redis would add up the requests of parallel tests. Tests of the limits set their own values.
for _name in ("RATE_LIMIT_SESSION", "RATE_LIMIT_PUBLIC", "RATE_LIMIT_RUN_STARTS", "RATE_LIMIT_UNAUTHENTICATED"):
    os.environ.setdefault(_name, "1000000")

"""Starts real processes for tests: the service, PostgreSQL and a Redis-compatible server.

``stack.Stack`` is the service; ``postgres.PostgresServer`` and ``redis.RedisServer`` are servers that a test may stop,
pause and kill. Fixtures are in ``plugin``. ``forks`` starts programs in Python without loading the libraries for each.
Every process ends with the test run, even if the run is killed.
"""

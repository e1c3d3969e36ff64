"""Starts the real thing for tests: the service's processes, PostgreSQL and a Redis-compatible server.

``stack.Stack`` is the service; ``postgres.PostgresServer`` and ``redis.RedisServer`` are servers that a test may stop,
pause and kill. Fixtures are in ``plugin``. Whatever is started here ends with the test run, however that ends.
"""

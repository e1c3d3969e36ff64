"""The benchmarks behind docs/benchmarks.md: ``make bench``, or one by ``python -m benchmarks NAME``."""

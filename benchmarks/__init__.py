"""The benchmarks behind the README's performance numbers: ``make bench``, or one by ``python -m benchmarks NAME``."""

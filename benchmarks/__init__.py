"""Each metric of the README as a command: ``make bench``, or ``python -m benchmarks runs`` for one of them."""

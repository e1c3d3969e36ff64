"""A file that one cannot keep in mind is two files."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES_MAX = 400
# All settings stand in one file, because operators look for them in one place.
LONGER = {"config/settings.py"}


def test_no_file_of_the_product_has_more_than_400_lines():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    product = [
        name
        for name in listed.stdout.split()
        if not name.startswith(("tests/", "benchmarks/")) and "/migrations/" not in name
    ]
    assert len(product) > 200
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in product if (ROOT / name).exists()}
    assert {name for name, lines in lengths.items() if lines > LINES_MAX} <= LONGER

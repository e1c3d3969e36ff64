"""Other values for constants of the service, in the processes of a test. Python imports this module at its start.

An environment variable whose name has dots names a constant: ``runs.lifecycle.line.RUN_LEASE_LOSSES_MAX=2``. The value
replaces the one in the source, so what the module computes from it at its import follows.
"""

import ast
import os
import select
import sys
import time
from importlib.machinery import PathFinder, SourceFileLoader

CONSTANTS = {}
for _name, _value in os.environ.items():
    if "." in _name:
        _module, _, _constant = _name.rpartition(".")
        CONSTANTS.setdefault(_module, {})[_constant] = _value


def parsed(value: str) -> object:
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value


class Loader(SourceFileLoader):
    def get_code(self, fullname):
        tree, values = ast.parse(self.get_data(self.path)), dict(CONSTANTS[fullname])
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in values:
                value = parsed(values.pop(node.targets[0].id))
                node.value = ast.copy_location(ast.Constant(value), node.value)
        if values:
            raise ImportError(f"{fullname} has no constant {', '.join(values)}")
        return compile(tree, self.path, "exec")


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in CONSTANTS or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        spec.loader = Loader(name, spec.origin)
        return spec


def sleep(seconds: float) -> None:
    """``time.sleep`` uses the monotonic clock, which libfaketime 0.9.10 breaks where it must stay correct."""
    select.select([], [], [], max(0.0, seconds))


if CONSTANTS:
    sys.meta_path.insert(0, Finder)
if "FAKETIME" in os.environ:
    time.sleep = sleep

"""Other values for constants of the service, in the processes of a test. Python imports this module at its start.

An environment variable whose name has dots names a constant: ``runs.lifecycle.line.RUN_LEASE_LOSSES_MAX=2``. The value
replaces the one in the source, so what the module computes from it at its import follows.

``CRASH_POINT=after_tool`` kills the process at that crash point each time it is reached, as a power cut does.
``freeze:after_tool`` stops the process there the first time, as a suspended machine does, until it gets a SIGCONT.
``committed_STATUS`` is between the commit that brings a run into that status and the messages about it.
"""

import ast
import os
import select
import signal
import sys
import threading
import time
from importlib.machinery import PathFinder, SourceFileLoader

CONSTANTS = {}
for _name, _value in os.environ.items():
    if "." in _name:
        _module, _, _constant = _name.rpartition(".")
        CONSTANTS.setdefault(_module, {})[_constant] = _value
CRASH_POINT, POINTS_MODULE = os.environ.get("CRASH_POINT", ""), "runs.lifecycle.crash"
if CRASH_POINT:
    CONSTANTS.setdefault(POINTS_MODULE, {})
frozen = []


def reached(name: str) -> None:
    if name == CRASH_POINT:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"freeze:{name}" == CRASH_POINT and not frozen:
        frozen.append(name)
        # Sent to this thread: another thread could take a signal to the process, while this one continues.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


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

    def exec_module(self, module):
        super().exec_module(module)
        if CRASH_POINT and module.__name__ == POINTS_MODULE:
            module.reached = reached


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

"""The built-in tools. Each module of this package declares one tool as ``TOOL``; ``TOOLS`` holds them by name.

A tool's catalogue row, its entry in the admin and the purge of its files follow from the declaration.
"""

import pkgutil
from importlib import import_module

from runs.tools.base import BuiltinTool

_modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
TOOLS: dict[str, BuiltinTool] = {module.TOOL.name: module.TOOL for module in _modules}

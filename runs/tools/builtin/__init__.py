"""The built-in tools. Each module of this package declares one tool as ``TOOL``; ``TOOLS`` holds them by name."""

import pkgutil
from importlib import import_module

from runs.tools.base import BuiltinTool

_modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
TOOLS: dict[str, BuiltinTool] = {module.TOOL.name: module.TOOL for module in _modules}

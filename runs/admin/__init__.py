"""The admin of runs, their journal and the catalogue, and the dashboard."""

from runs.admin import agents, providers, runs, tools

__all__ = ["agents", "providers", "runs", "tools"]

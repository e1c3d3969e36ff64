"""The admin of runs, their journal and the catalogue, and the dashboard."""

from runs.admin import agents, person, providers, runs, tools

__all__ = ["agents", "person", "providers", "runs", "tools"]

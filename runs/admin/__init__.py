"""The admin of runs, their journal and the catalogue, and the dashboard."""

from runs.admin import agents, journal, providers, runs, tools

__all__ = ["agents", "journal", "providers", "runs", "tools"]

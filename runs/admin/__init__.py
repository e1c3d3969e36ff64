"""The admin of runs, their journal and the catalogue, and the dashboard."""

from runs.admin import agents, catalogue, journal, models, runs

__all__ = ["agents", "catalogue", "journal", "models", "runs"]

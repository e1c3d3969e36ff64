"""The admin of runs, their journal and the catalogue, and the dashboard."""

from runs.admin import catalogue, journal, runs

__all__ = ["catalogue", "journal", "runs"]

"""Formal tasks: strings with a label at every position, and how deeply nested Python is."""

from .parse import TASKS, parse_task
from .task import Task

__all__ = ["TASKS", "Task", "parse_task"]

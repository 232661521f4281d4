"""Training models on tasks: recipes, the loop, evaluation by length, and seeds as a job of the engine."""

from .evaluation import LengthResult, evaluate
from .recipe import Curriculum, Recipe
from .recipes import default_options, default_recipe
from .task_data import TaskData
from .train_job import TrainReport, fine_tuning_cell, new_cell, train, train_cell
from .trainer import Trainer

__all__ = [
    "Curriculum",
    "LengthResult",
    "Recipe",
    "TaskData",
    "TrainReport",
    "Trainer",
    "default_options",
    "default_recipe",
    "evaluate",
    "fine_tuning_cell",
    "new_cell",
    "train",
    "train_cell",
]

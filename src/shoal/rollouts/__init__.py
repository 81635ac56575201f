"""From tasks to rewards: an agent acts in a sandbox, and the tests of the fix say what it achieved."""

from shoal.rollouts.agents import Agent
from shoal.rollouts.batch import Progress, run, run_async
from shoal.rollouts.report import Report
from shoal.rollouts.results import Rollout
from shoal.rollouts.tasks import Task, load_tasks, select_tasks

__all__ = ["Agent", "Progress", "Report", "Rollout", "Task", "load_tasks", "run", "run_async", "select_tasks"]

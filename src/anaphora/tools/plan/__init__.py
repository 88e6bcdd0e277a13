"""``anaphora plan``: what prefix caching would save on a card that was measured, computed without one."""

from anaphora.tools.plan.command import run
from anaphora.tools.plan.options import PlanOptions

__all__ = ["PlanOptions", "run"]

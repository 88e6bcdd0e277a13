"""``anaphora plan``: estimates what prefix caching saves on a measured card, without needing the card."""

from anaphora.tools.plan.command import run
from anaphora.tools.plan.options import PlanOptions

__all__ = ["PlanOptions", "run"]

"""Pipeline schedules as data: made, drawn, priced, proven, and run by one small runtime.

orders.py, zero_bubble.py -> plan.py -> price.py, picture.py (``python -m megatron_ext.schedules``)
                                     -> runtime.py (on the ranks)
"""

from __future__ import annotations

from megatron_ext.schedules.build import SCHEDULES, build_plan
from megatron_ext.schedules.plan import Action, Durations, Kind, Plan
from megatron_ext.schedules.price import Price, price

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Kind",
    "Plan",
    "Price",
    "build_plan",
    "price",
]

"""The forward part of any plan, for evaluation."""

from stretto.ir.action import Op
from stretto.ir.plan import Plan, actions_of


def forward_only(plan: Plan) -> Plan:
    """Return a plan with the same forwards in the same order, without the backwards.

    >>> from stretto.schedules.one_f_one_b import one_f_one_b
    >>> print(forward_only(one_f_one_b(devices=2, microbatches=2)))
    0F0,0F1
    1F0,1F1
    """
    rows = (tuple(action for cell in row for action in actions_of(cell) if action.op is Op.F) for row in plan.rows)
    return Plan(tuple(rows), plan.placement)

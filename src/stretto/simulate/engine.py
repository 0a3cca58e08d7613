"""The engine: every task starts when its lane is free and its needs have ended."""

import math

import numpy as np

from stretto.costs import Costs, costs_or_default
from stretto.ir.errors import CostError, ProgramError
from stretto.ir.plan import Plan
from stretto.program.graph import Graph, lane_graph
from stretto.program.lower import lowered
from stretto.program.program import Program
from stretto.simulate.durations import durations
from stretto.simulate.sharing import replay_sharing
from stretto.timeline import Timeline


def simulate(program: Plan | Program, costs: Costs | None = None) -> Timeline:
    """Run a plan or program against a cost table; without one, F = I = W = 1, B = 2, a pair 3, transfers 0.

    A lane runs its tasks in order. A transfer takes place on both its lanes at once. Receives are
    assumed to be posted in time, so only a lane's own order and the needs hold a task back. Missing
    tasks are no error here; `check` finds them. Lanes that share a resource slow each other down (`SharedResource`).

    >>> from stretto.schedules.gpipe import gpipe
    >>> simulate(gpipe(devices=2, microbatches=3)).makespan
    12.0
    """
    program = lowered(program)
    graph = lane_graph(program)
    if stuck := graph.stuck():
        raise ProgramError(
            "the program cannot run: tasks wait in a circle, and so never start; "
            f"{program.task(int(graph.task[stuck[0]]))} is one of {len(stuck)}, and check() names the circle"
        )
    graph, costs = graph.ordered(), costs_or_default(costs)
    time = durations(program, costs)[graph.task].tolist()
    start, end = replay_sharing(program, costs, graph, time) if costs.shared else _replay(graph, time)
    if not math.isfinite(max(end)):
        raise CostError("the step would take longer than a number can say; use a larger unit of time")
    return Timeline(program, np.array(start)[graph.node], np.array(end)[graph.node], costs.unit)


def _replay(graph: Graph, time: list[float]) -> tuple[list[float], list[float]]:
    """Return the start and end of every node; each edge's source must come before its target."""
    order = np.argsort(graph.target, kind="stable")
    start, end = [0.0] * len(time), [0.0] * len(time)
    node, begin = 0, 0.0
    for source, target in zip(graph.source[order].tolist(), graph.target[order].tolist(), strict=True):
        while node < target:  # all edges to this node are behind us
            start[node], end[node] = begin, begin + time[node]
            node, begin = node + 1, 0.0
        if (ended := end[source]) > begin:
            begin = ended
    for last in range(node, len(time)):
        start[last], end[last] = begin, begin + time[last]
        begin = 0.0
    return start, end

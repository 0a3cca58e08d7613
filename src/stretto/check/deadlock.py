"""No task waits in a circle, however strictly transfers block."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from stretto.check.violation import Violation
from stretto.program.graph import Graph, queue_edges, wait_graph
from stretto.program.program import Program
from stretto.program.task import Kind
from stretto.program.work import Bools, Ints, last_before


def deadlock(program: Program) -> Iterator[Violation]:
    """Look on an ideal machine first, then on the strictest one we promise to run on.

    Ideally only compute and comm are in order, and transfers take place whenever both ends are ready. Strictly,
    a device's host issues everything in order, computing as it goes; the device moves one transfer
    at a time, in issue order; and a transfer takes place only when both devices have come to it.
    Either way a transfer is one node with both its ends.
    """
    compute, device = program.compute, program.device
    ideal = (queue_edges(np.where(program.moving, -1, program.lane)),)
    strict = (*ideal, queue_edges(np.where(program.moving, device, -1)), _issued_after(compute, device))
    for edges, where in ((ideal, ""), (strict, " where transfers block until matched")):
        graph = wait_graph(program, *edges)
        if stuck := graph.stuck():
            tasks = [int(graph.task[node]) for node in _short_cycle(graph, stuck)]
            first = min(range(len(tasks)), key=lambda k: (device[tasks[k]], tasks[k]))
            tasks = tasks[first:] + tasks[:first]
            steps = [_wait(program, a, b) for a, b in zip(tasks, [*tasks[1:], tasks[0]], strict=True)]
            message = f"tasks wait in a circle{where}: {_name(program, tasks[0])} {', which '.join(steps)}"
            yield Violation("deadlock", message, tuple(tasks))
            return


def _issued_after(compute: Bools, device: Ints) -> tuple[Ints, Ints]:
    """An edge from each device's last compute task to everything else issued after it."""
    before, after = last_before(compute, device), np.arange(len(device))
    chosen = (before >= 0) & ~compute
    return before[chosen], after[chosen]


def _short_cycle(graph: Graph, stuck: list[int]) -> list[int]:
    """A cycle among the stuck nodes, each node waiting for the next."""
    waits: dict[int, list[int]] = {node: [] for node in stuck}
    for source, target in zip(graph.source.tolist(), graph.target.tolist(), strict=True):
        if source in waits and target in waits:
            waits[target].append(source)
    path, seen = [stuck[0]], {stuck[0]: 0}
    while (following := waits[path[-1]][0]) not in seen:
        seen[following] = len(path)
        path.append(following)
    cycle = path[seen[following] :]
    return min((_cycle_through(node, waits) for node in cycle[:50]), key=len)


def _cycle_through(start: int, waits: dict[int, list[int]]) -> list[int]:
    """The shortest way from a node back to itself."""
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for following in waits[node]:
            if following == start:
                path = [node]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if following not in came:
                came[following] = node
                queue.append(following)
    raise AssertionError("a node of a cycle leads back to itself")


def _wait(program: Program, waiting: int, awaited: int) -> str:
    """Why one task, or transfer, waits for another: "needs …" or "comes after …"."""
    name = _name(program, awaited)
    ends, others = program.ends(waiting), program.ends(awaited)
    if any(need in others for end in ends for need in program.needs(end)):
        return f"needs {name}"
    device = next(
        int(program.device[end])
        for end in ends
        for before in others
        if program.device[end] == program.device[before] and before < end
    )
    return f"comes after {name}" if len(others) == 1 else f"comes on device {device} after {name}"


def _name(program: Program, index: int) -> str:
    task = program.task(index)
    if program.mate[index] < 0 or task.kind is Kind.BROADCAST:
        return str(task) if program.mate[index] >= 0 else f"{task} on device {task.device}"
    send = task if task.lane.name == "send" else program.task(int(program.mate[index]))
    return f"{send} from device {send.device} to {send.lane.peer}"

"""Rule: no tasks wait in a circle, however strictly transfers block."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from stretto.check.dependencies import required
from stretto.check.violation import Violation
from stretto.program.columns import Bools, Ints, last_before, queue_edges
from stretto.program.graph import Graph, need_edges, wait_graph
from stretto.program.program import Program
from stretto.program.task import COMPUTE, Kind


def deadlock(program: Program, actions: Graph) -> Iterator[Violation]:
    """Check the actions alone first, by their `action_graph`, then the strictest machine we promise to run on.

    On that machine, a device's host issues everything in order, computing as it goes. The device makes one transfer,
    sum or exchange between expert-parallel ranks at a time, in issue order. Each of these is one node with all its
    ends: it takes place only when all its devices have reached it.
    """
    device, moving, compute = program.device, program.joint, program.compute
    strict = wait_graph(
        program,
        need_edges(program),
        queue_edges(np.where(moving & ~compute, -1, program.lane)),  # whole passes may exchange tokens, too
        queue_edges(np.where(moving, device, -1)),
        _issued_after(compute, device),
    )
    graphs = [(actions, ""), (strict, " where transfers block until matched")]
    for graph, where in graphs[:1] if program.is_own else graphs:
        if stuck := graph.stuck():
            tasks = _turns(program, [int(graph.task[node]) for node in _short_cycle(graph, stuck)])
            first = min(range(len(tasks)), key=lambda k: (device[tasks[k]], tasks[k]))
            tasks = tasks[first:] + tasks[:first]
            steps = [_wait(program, a, b) for a, b in zip(tasks, [*tasks[1:], tasks[0]], strict=True)]
            message = f"tasks wait in a circle{where}: {_name(program, tasks[0])} {', which '.join(steps)}"
            yield Violation("deadlock", message, tuple(tasks))
            return


def action_graph(program: Program) -> Graph:
    """Return what waits for what if no transfers were needed: actions wait for what they need, on whichever device
    produces it, and for the action before them on their lane.
    """
    acting = ~program.moving
    demands = [] if program.is_update or program.is_own else [(need, task) for task, need in required(program)]
    needs = [
        (before[exist], after[exist])
        for before, after in (need_edges(program), *demands)
        for exist in [(before >= 0) & (after >= 0) & acting[before] & acting[after]]
    ]
    return wait_graph(program, *needs, queue_edges(np.where(acting, program.lane, -1)))


def _issued_after(compute: Bools, device: Ints) -> tuple[Ints, Ints]:
    """Return an edge to each non-compute task from the last compute task its device issued before it."""
    before, after = last_before(compute, device), np.arange(len(device))
    chosen = (before >= 0) & ~compute
    return before[chosen], after[chosen]


def _short_cycle(graph: Graph, stuck: list[int]) -> list[int]:
    """Return a short cycle among the stuck nodes, each node waiting for the next."""
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
    """Return the shortest path from a node back to itself."""
    parent: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for following in waits[node]:
            if following == start:
                path = [node]
                while path[-1] != start:
                    path.append(parent[path[-1]])
                return path[::-1]
            if following not in parent:
                parent[following] = node
                queue.append(following)
    raise AssertionError("a node of a cycle leads back to itself")


def _turns(program: Program, cycle: list[int]) -> list[int]:
    """Leave out of a cycle the tasks it only passes along a lane, where each task waits for all before it."""
    lane, moving = program.lane, program.moving
    return [
        task
        for before, task, after in zip([cycle[-1], *cycle[:-1]], cycle, [*cycle[1:], cycle[0]], strict=True)
        if not (lane[before] == lane[task] == lane[after] and before > task > after) or moving[task]
    ]


def _wait(program: Program, waiting: int, awaited: int) -> str:
    """Return why one task or transfer waits for another: "needs …" or "comes after …"."""
    name = _name(program, awaited)
    ends, others = program.ends(waiting), program.ends(awaited)
    together = (
        int(program.device[end])
        for end in ends
        for before in others
        if program.device[end] == program.device[before] and before < end
    )
    device = next(together, None)
    if device is None or any(need in others for end in ends for need in program.needs(end)):
        return f"needs {name}"
    return f"comes after {name}" if len(others) == 1 else f"comes on device {device} after {name}"


def _name(program: Program, index: int) -> str:
    task = program.task(index)
    if task.kind in COMPUTE and program.counterpart[index] >= 0:
        ends = {program.device.item(end): end for end in program.ends(index)}
        return f"{program.task(ends[min(ends)])} on devices {', '.join(map(str, sorted(ends)))}"
    if program.counterpart[index] < 0 or task.kind in (Kind.BROADCAST, Kind.REDUCE, Kind.CALL):
        return str(task) if program.counterpart[index] >= 0 else f"{task} on device {task.device}"
    send = task if task.lane.name == "send" else program.task(int(program.counterpart[index]))
    return f"{send} from device {send.device} to {send.lane.peer}"

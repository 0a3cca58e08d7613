"""The wait graph of a program: an edge leads from each node to a node that waits for it."""

from dataclasses import dataclass

import numpy as np

from stretto.ir.errors import ProgramError
from stretto.program.columns import Ints, grouped, queue_edges
from stretto.program.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A node is a task, or all ends of a transfer or collective; nodes are numbered in program sequence."""

    node: Ints
    """The node of each task."""
    task: Ints
    """One task of each node, which stands for it."""
    source: Ints
    target: Ints

    def stuck(self) -> list[int]:
        """Return the nodes that can never start: they wait in a circle, or for a node that does."""
        return [] if self.in_order() else self._sequence()[1]

    def in_order(self) -> bool:
        """Return whether every edge leads from a lower number to a higher one."""
        return bool((self.source < self.target).all())

    def ordered(self) -> "Graph":
        """Return the graph renumbered so that every edge leads to a higher number; stuck nodes come last."""
        if self.in_order():
            return self
        number = np.empty(len(self.task), dtype=np.int64)
        done, stuck = self._sequence()
        order = np.array(done + stuck, dtype=np.int64)
        number[order] = np.arange(len(order))
        return Graph(number[self.node], self.task[order], number[self.source], number[self.target])

    def _sequence(self) -> tuple[list[int], list[int]]:
        count = len(self.task)
        order, start = grouped(self.source, count)
        followers, bounds = self.target[order].tolist(), start.tolist()
        waits = np.bincount(self.target, minlength=count).tolist()
        done = [node for node in range(count) if not waits[node]]
        for node in done:
            for follower in followers[bounds[node] : bounds[node + 1]]:
                waits[follower] -= 1
                if not waits[follower]:
                    done.append(follower)
        return done, [node for node in range(count) if waits[node]]


def wait_graph(program: Program, *edges: tuple[Ints, Ints]) -> Graph:
    """Return the graph of these (before, after) edges between the program's tasks."""
    leader = leaders(program)
    leads = leader == np.arange(len(program))
    node = (np.cumsum(leads) - 1)[leader]
    source = node[np.concatenate([before for before, _ in edges])]
    target = node[np.concatenate([after for _, after in edges])]
    return Graph(node, np.flatnonzero(leads), source, target)


def leaders(program: Program) -> Ints:
    """Return, for each task, the last end of its transfer or collective, which stands for all ends; else the task."""
    index = np.arange(len(program))
    ahead, leader = np.where(program.counterpart < 0, index, program.counterpart), index
    while not np.array_equal(further := np.maximum(leader, leader[ahead]), leader):
        leader, ahead = further, ahead[ahead]  # look twice as far round the ring, until no later end turns up
    return leader


def need_edges(program: Program) -> tuple[Ints, Ints]:
    """Return an edge from each need to its task, except where lane order already implies it."""
    need, task = program.need, program.needing
    across = (program.lane[need] != program.lane[task]) | (need >= task)
    return need[across], task[across]


def lane_graph(program: Program) -> Graph:
    """Return the graph in which tasks wait for their needs and for the task before them on their lane."""
    if (wrong := program.malformed) is not None:
        raise ProgramError(f"this is no program: {wrong}")
    before, after = queue_edges(program.lane)
    previous = np.full(len(program), -1, dtype=np.int64)
    previous[after] = before
    # Where a link's two lanes have two transfers in the same order, one edge between them is enough.
    other = program.counterpart[after]
    twice = (other >= 0) & (other < after) & (previous[other] == program.counterpart[before]) & (previous[other] >= 0)
    return wait_graph(program, need_edges(program), (before[~twice], after[~twice]))

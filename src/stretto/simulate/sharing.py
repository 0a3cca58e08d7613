"""The engine for lanes that share resources: tasks slow each other down, so time goes from event to event."""

from collections import defaultdict
from heapq import heappop, heappush
from itertools import chain

import numpy as np

from stretto.costs import Costs
from stretto.program.columns import grouped
from stretto.program.graph import Graph
from stretto.program.program import Program


def replay_sharing(program: Program, costs: Costs, graph: Graph, time: list[float]) -> tuple[list[float], list[float]]:
    """Return the start and end of every node, given how long each takes at full speed."""
    return _Replay(graph, time, _draws(program, costs, graph)).run()


Draws = list[list[tuple["_Resource", float]]]


class _Resource:
    """A shared resource: its capacity, and how much of it each end of each running node wants."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.wants: dict[int, list[float]] = defaultdict(list)

    def level(self) -> float:
        """Return the most any end gets: ends that want less get all they want, the others share the rest equally."""
        wants = sorted(chain.from_iterable(self.wants.values()))
        left, sharers = self.capacity, len(wants)
        for want in wants:
            if want * sharers >= left:
                return left / sharers
            left -= want
            sharers -= 1
        return float("inf")


def _draws(program: Program, costs: Costs, graph: Graph) -> Draws:
    """Return what each node draws on, and how much; a transfer or collective draws on something at every end."""
    resources: dict[tuple[str, int], _Resource] = {}
    of_lane: list[list[tuple[_Resource, float]]] = []
    for lane in program.lanes:
        of_lane.append([])
        for name, shared in costs.shared.items():
            if lane.name in shared.lanes:
                key = name, lane.device // shared.devices
                resource = resources.setdefault(key, _Resource(shared.capacity))
                of_lane[-1].append((resource, shared.lanes[lane.name]))
    draws: Draws = [[] for _ in range(len(graph.task))]
    for lane_index, node in zip(program.lane.tolist(), graph.node.tolist(), strict=True):
        draws[node] += of_lane[lane_index]
    return draws


class _Replay:
    def __init__(self, graph: Graph, time: list[float], draws: Draws) -> None:
        count = len(time)
        self._draws, self._left = draws, time.copy()  # the time each node still needs at full speed
        order, bounds = grouped(graph.source, count)
        self._followers, self._bounds = graph.target[order].tolist(), bounds.tolist()
        self._waits = np.bincount(graph.target, minlength=count).tolist()
        self._start, self._end = [0.0] * count, [0.0] * count
        self._speed, self._seen = [1.0] * count, [0.0] * count  # when `_left` was last updated
        self._turn = [0] * count  # counts changes of speed; forecasts of earlier turns are void
        self._forecast: list[tuple[float, int, int]] = []
        self._now = 0.0

    def run(self) -> tuple[list[float], list[float]]:
        starting = [node for node, waits in enumerate(self._waits) if not waits]
        while True:
            self._begin(starting)
            starting = []
            while self._forecast and not starting:
                self._now = max(self._now, self._forecast[0][0])
                starting = self._finish()
            if not starting:
                return self._start, self._end

    def _begin(self, nodes: list[int]) -> None:
        for node in nodes:
            self._start[node] = self._seen[node] = self._now
            for resource, want in self._draws[node]:
                resource.wants[node].append(want)
        self._adjust(nodes, nodes)

    def _finish(self) -> list[int]:
        """End all nodes that are due now, and return the nodes that can then start."""
        done, ready = [], []
        while self._forecast and self._forecast[0][0] <= self._now:
            _, node, turn = heappop(self._forecast)
            if turn != self._turn[node]:
                continue
            self._turn[node] += 1
            self._end[node] = self._now
            done.append(node)
            for resource, _ in self._draws[node]:
                resource.wants.pop(node, None)
            for follower in self._followers[self._bounds[node] : self._bounds[node + 1]]:
                self._waits[follower] -= 1
                if not self._waits[follower]:
                    ready.append(follower)
        self._adjust(done, [])
        return ready

    def _adjust(self, changed: list[int], fresh: list[int]) -> None:
        """Update the speeds and forecasts of all nodes that share a resource with the changed ones."""
        touched = {id(resource): resource for node in changed for resource, _ in self._draws[node]}
        affected = dict.fromkeys(fresh)
        for resource in touched.values():
            affected.update(dict.fromkeys(resource.wants))
        levels: dict[int, float] = {}
        for node in affected:
            speed = 1.0
            for resource, want in self._draws[node]:
                if id(resource) not in levels:
                    levels[id(resource)] = resource.level()
                if levels[id(resource)] < want:
                    speed = min(speed, levels[id(resource)] / want)
            if speed != self._speed[node] or not self._turn[node]:
                self._left[node] -= (self._now - self._seen[node]) * self._speed[node]
                self._seen[node], self._speed[node] = self._now, speed
                self._turn[node] += 1
                left = max(0.0, self._left[node])
                due = self._now + (left / speed if speed else float("inf") if left else 0.0)
                heappush(self._forecast, (due, node, self._turn[node]))

"""Reference machines: programs run step by step, by rules written apart from `check` and `simulate`."""

from collections.abc import Sequence

from stretto.ir.placement import Placement
from stretto.program.task import EXPERT_SUM, Kind, Task


class Stuck(Exception):
    pass


class Machine:
    """Devices that compute in issue order and move one thing at a time, meeting at each transfer and at each sum.

    `serial` devices finish each task before they start the next; otherwise a transfer only has to
    wait for the transfers and the compute issued before it. Passes of `experts`, stages whose experts are shared out
    among the expert-parallel ranks of a mesh, are met by all these ranks, as transfers are.
    """

    def __init__(
        self, tasks: Sequence[Task], placement: Placement, *, serial: bool, experts: Sequence[int] = ()
    ) -> None:
        self.experts = experts
        devices = 1 + max(*map(max, placement.routes), max(task.device for task in tasks))
        self.queues = [[task for task in tasks if task.device == device] for device in range(devices)]
        self.last = placement.stages - 1
        self.placement = placement
        self.serial = serial
        self.held: list[set[tuple[str, int, int]]] = [set() for _ in range(devices)]

    def run(self) -> None:
        while any(self.queues):
            self._issue()
            if not any(self._compute(device) for device in range(len(self.queues))) and not self._transfer():
                raise Stuck

    def _issue(self) -> None:
        """Hosts issue what stands before their next compute task; a send needs something to send by then."""
        for queue, held in zip(self.queues, self.held, strict=True):
            for task in queue:
                if task.lane.name == "compute":
                    break
                if task.lane.name == "send" and self._moved(task) not in held:
                    raise Stuck(f"{task} before there is anything to send")
                if task.kind is Kind.REDUCE and not self._summands(task) <= held:
                    raise Stuck(f"{task} before all is there that it sums")

    def _summands(self, task: Task) -> set[tuple[str, int, int]]:
        """The weight gradients of a stage that are made on the device of a sum."""
        placement = self.placement
        here = [k for k in range(placement.microbatches) if placement.device(task.stage, k) == task.device]
        return {("weight", task.stage, k) for k in here}

    def _compute(self, device: int) -> bool:
        queue = self.queues[device]
        at = next((k for k, task in enumerate(queue) if task.lane.name == "compute"), None)
        if at is None or (self.serial and at) or not self._ready(device, queue[at]):
            return False
        met = self._met(device, queue[at])
        if met is None:
            return False
        for other in met:
            at = next(k for k, task in enumerate(self.queues[other]) if task.lane.name == "compute")
            self.held[other] |= self._results(self.queues[other].pop(at))
        return True

    def _met(self, device: int, task: Task) -> list[int] | None:
        """The devices that run a pass together, if all have come to it; None if they have not."""
        stages = [stage for kind, stage, _ in self._parts(task) if kind != "W"]
        mesh = self.placement.mesh
        if mesh is None or not any(stage in self.experts for stage in stages):
            return [device]
        pp, replica = mesh.place(device)
        devices = [mesh.device(pp=pp, replica=other) for other in mesh.ep_replicas(replica)]
        for other in devices:
            head = next(iter(self.queues[other]), None)  # what was issued before has been moved
            if head is None or self._alike(head) != self._alike(task) or not self._ready(other, head):
                return None
        return devices

    def _alike(self, task: Task) -> list[tuple[str, int, int]]:
        """What a task does for which microbatch of its replica."""
        each = self.placement.microbatches // self.placement.replicas
        parts = self._parts(task) if task.lane.name == "compute" else [(str(task), -1, -1)]
        return [(kind, stage, microbatch % each) for kind, stage, microbatch in parts]

    def _ready(self, device: int, task: Task) -> bool:
        """Everything the task reads is on the device, and nothing it makes was made before."""
        held, needs = self.held[device], set()
        for kind, stage, microbatch in self._parts(task):
            if kind == "F":
                needs |= {("act", stage - 1, microbatch)} if stage else set()
            elif kind == "I":
                needs |= {("saved", stage, microbatch)}
                needs |= {("grad", stage + 1, microbatch)} if stage < self.last else set()
            else:
                needs |= {("owed", stage, microbatch)}
        return needs <= held and not self._results(task) & held

    def _parts(self, task: Task) -> list[tuple[str, int, int]]:
        match task.kind:
            case Kind.F:
                return [("F", task.stage, task.microbatch)]
            case Kind.B | Kind.I:
                return [("I", task.stage, task.microbatch)]
            case Kind.PAIR:
                assert task.backward is not None
                return [("F", task.stage, task.microbatch), ("I", *task.backward)]
            case Kind.W | Kind.WGRAD:
                return [("W", task.stage, task.microbatch)]
            case _:
                raise AssertionError

    def _results(self, task: Task) -> set[tuple[str, int, int]]:
        made = {"F": ("act", "saved"), "I": ("grad", "owed"), "W": ("weight",)}
        return {(what, stage, k) for kind, stage, k in self._parts(task) for what in made[kind]}

    def _transfer(self) -> bool:
        heads = [self._next_transfer(device) for device in range(len(self.queues))]
        for device, at in enumerate(heads):
            if at is None:
                continue
            send = self.queues[device][at]
            if send.kind is Kind.REDUCE and self._sum(send, heads):
                return True
            if send.lane.name != "send" or send.lane.peer is None or not send.lane.peer < len(heads):
                continue
            peer_at = heads[send.lane.peer]
            if peer_at is None or not self._meet(send, self.queues[send.lane.peer][peer_at]):
                continue
            self.held[send.lane.peer].add(self._moved(send))
            self.queues[device].pop(at)
            self.queues[send.lane.peer].pop(peer_at)
            return True
        return False

    def _sum(self, task: Task, heads: list[int | None]) -> bool:
        """All devices on which the stage lives, or all with the same experts of it, have come to its sum."""
        homes = {device for device, stage in self.placement.homes if stage == task.stage}
        mesh = self.placement.mesh
        if task.part == EXPERT_SUM and mesh is not None:
            rank = mesh.ep_rank(mesh.place(task.device)[1])
            homes = {device for device in homes if mesh.ep_rank(mesh.place(device)[1]) == rank}
        for home in homes:
            at = heads[home]
            if at is None:
                return False
            other = self.queues[home][at]
            if (other.kind, other.stage, other.part) != (Kind.REDUCE, task.stage, task.part):
                return False
        for home in homes:
            at = heads[home]
            assert at is not None
            self.queues[home].pop(at)
        return True

    def _moved(self, send: Task) -> tuple[str, int, int]:
        return ("act" if send.kind == Kind.SEND_F else "grad", send.stage, send.microbatch)

    def _next_transfer(self, device: int) -> int | None:
        """The device's next transfer, if its host has come to it: no compute task stands before it."""
        at = next((k for k, task in enumerate(self.queues[device]) if task.lane.name != "compute"), None)
        return None if at is None or any(task.lane.name == "compute" for task in self.queues[device][:at]) else at

    def _meet(self, send: Task, receive: Task) -> bool:
        step, kind = (1, Kind.RECV_F) if send.kind == Kind.SEND_F else (-1, Kind.RECV_B)
        return (receive.kind, receive.stage, receive.microbatch, receive.lane.peer) == (
            kind,
            send.stage + step,
            send.microbatch,
            send.device,
        )


def completes(
    tasks: Sequence[Task], placement: Placement, *, serial: bool = False, experts: Sequence[int] = ()
) -> bool:
    try:
        Machine(tasks, placement, serial=serial, experts=experts).run()
    except Stuck:
        return False
    return True


def actions_complete(tasks: Sequence[Task], placement: Placement) -> bool:
    """Whether the actions could run in their order if nothing had to be moved: all devices hold the same."""
    machine = Machine([task for task in tasks if task.lane.name == "compute"], placement, serial=True)
    machine.held = [set()] * len(machine.held)
    try:
        machine.run()
    except Stuck:
        return False
    return True

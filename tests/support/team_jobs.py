"""What ranks of a team do whose groups fail."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from stretto.execute.groups import Groups
from stretto.execute.members import Members
from stretto.execute.team import Team
from stretto.schedules import one_f_one_b

SECONDS = 10.0


def _team(mesh: DeviceMesh) -> tuple[Team, Groups]:
    team = Team(Members.of_mesh(mesh), torch.device("cpu"), timeout=60)
    assert team.groups is not None
    return team, team.groups


def _said(groups: Groups) -> str:
    """Why the groups have failed, as soon as they have."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            groups.check()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    return ""


def one_group_fails(mesh: DeviceMesh) -> str:
    """Why each rank says that the team cannot go on, after the first has given up a group of the first two only."""
    team, groups = _team(mesh)
    pair: Any = team.make([0, 1])
    others = team.make([1, 2])
    assert (others is None) == (team.rank == 0)
    dist.barrier()
    if pair is not None and team.rank == 0:
        pair.abort()
    said = _said(groups)
    dist.barrier()
    team.close()
    return said


def asked_when_closed(mesh: DeviceMesh) -> tuple[str, str]:
    """Why the team has failed, asked before and after it was closed."""
    team, groups = _team(mesh)
    dist.barrier()
    if team.rank == 0:
        groups.everybody.abort()
    before = _said(groups)
    dist.barrier()
    team.close()
    return before, _said(groups)


class Summing(nn.Module):
    """Fails in its second forward on one rank, and on the other is in a sum with it by then."""

    def __init__(self, rank: int, group: Any) -> None:
        super().__init__()
        self.inner, self.rank, self.group, self.calls = nn.Linear(4, 4), rank, group, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.rank:
            dist.send(torch.zeros(1), 0)
            dist.all_reduce(torch.zeros(1), group=self.group)
        elif self.calls > 1:
            dist.recv(torch.zeros(1), 1)
            time.sleep(0.2)
            raise ValueError("no more")
        return self.inner(x)  # type: ignore[no-any-return]


def collective_in_a_layer(mesh: DeviceMesh) -> str:
    """What a rank says whose layer is in a collective of its own while the other rank fails."""
    rank, group = mesh.get_local_rank(), dist.new_group([0, 1])
    plan = one_f_one_b(devices=2, microbatches=2)
    layers = [Summing(0, group), Summing(1, group)]
    pipe = stretto.Pipeline(layers, plan=plan, loss=nn.functional.mse_loss, mesh=mesh, timeout=30)
    x, said = torch.ones(4, 4), "went on"
    try:
        pipe.step(x, x)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    if rank == 0:
        time.sleep(0.5)
        group.abort()
    return said

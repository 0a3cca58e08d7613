"""What expert-parallel ranks run together: parts of passes, or whole passes, that send tokens to experts elsewhere."""

from itertools import chain

import numpy as np

from stretto.ir.placement import Placement
from stretto.program.anatomy import Anatomy
from stretto.program.columns import Bools, Ints, TaskColumns
from stretto.program.task import Kind

_BACKWARDS = (Kind.B, Kind.I, Kind.RECOMPUTE)


def joint_passes(work: TaskColumns, anatomy: Anatomy, placement: Placement) -> Bools:
    """Return which tasks expert-parallel ranks run together."""
    joint = np.zeros(len(work), dtype=np.bool_)
    if not anatomy.experts or placement.mesh is None:
        return joint
    for kinds, parts, rows in (
        ((Kind.F,), anatomy.forward, anatomy.forward_rows),
        (_BACKWARDS, anatomy.backward, anatomy.backward_rows),
    ):
        together = np.array([anatomy.is_joint(stage, part) for stage, own in enumerate(parts) for part in own])
        task = np.flatnonzero(work.among(kinds))
        joint[task] = together[rows[work.stage[task]] + work.part[task]]
    pair = np.flatnonzero(work.kind == Kind.PAIR)
    joint[pair] = np.isin(work.stage[pair], anatomy.experts) | np.isin(work.stage_b[pair], anatomy.experts)
    return joint


def meeting_points(work: TaskColumns, anatomy: Anatomy, placement: Placement) -> Ints:
    """Return a number for each task that expert-parallel ranks run together, the same for all its ends; else −1.

    The ends of one meeting do the same for microbatches of the same number, each in its own replica.
    """
    point = np.full(len(work), -1)
    task = np.flatnonzero(joint_passes(work, anatomy, placement))
    if not len(task) or placement.mesh is None:
        return point
    mesh, each = placement.mesh, placement.microbatches // placement.replicas
    groups = np.array([mesh.ep_replicas(replica)[0] for replica in range(mesh.replicas)])
    replica, microbatch = np.divmod(work.microbatch[task], each)
    kind = np.where(work.kind[task] == Kind.I, Kind.B, work.kind[task])
    paired = work.stage_b[task] >= 0
    columns = (
        groups[replica],
        kind,
        work.stage[task],
        work.part[task],
        microbatch,
        work.stage_b[task],
        np.where(paired, work.microbatch_b[task] - replica * each, -1),
    )
    point[task] = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].ravel()
    return point


def expert_rings(work: TaskColumns, anatomy: Anatomy, placement: Placement, counterpart: Ints) -> None:
    """Join the ends of all that expert-parallel ranks run together into rings, in place."""
    if not anatomy.experts:
        return
    point = meeting_points(work, anatomy, placement)
    task = np.flatnonzero(point >= 0)
    task = task[np.argsort(point[task], kind="stable")]
    same = point[task[1:]] == point[task[:-1]]
    first = np.flatnonzero(np.concatenate(([True], ~same)))
    last = np.concatenate((first[1:], [len(task)])) - 1
    following = np.concatenate((task[1:], task[:1]))
    following[last] = task[first]
    several = np.repeat(last > first, last - first + 1)
    counterpart[task[several]] = following[several]


def expert_steps(anatomy: Anatomy) -> tuple[Bools, Bools, Bools]:
    """Return which rows of forward parts, backward parts and weight gradients work on the tokens that experts got: from
    a layer's first joint phase with a backward to its last, in stages whose experts are on several ranks.
    """
    forward: list[list[bool]] = []
    for stage, parts in enumerate(anatomy.forward):
        inside = [False] * len(parts)
        for layer in range(len(anatomy.layers[stage])) if stage in anatomy.experts else ():
            joint = [
                k for k, part in enumerate(parts) if part.layer == layer and part.phase.is_joint and part.phase.backward
            ]
            for k in range(joint[0], joint[-1] + 1) if joint else ():
                inside[k] = parts[k].phase.backward
        forward.append(inside)
    backward = [[own[step] for step in steps] for own, steps in zip(forward, anatomy.forward_steps, strict=True)]
    weight = [[own[step] for step in steps] for own, steps in zip(backward, anatomy.weight_steps, strict=True)]
    every = tuple(np.array([*chain.from_iterable(rows)], dtype=np.bool_) for rows in (forward, backward, weight))
    return every[0], every[1], every[2]

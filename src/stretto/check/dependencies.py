"""Rule: every task has what it needs before it starts."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from stretto.check.violation import Violation
from stretto.check.waits import Waits
from stretto.program.columns import Ints
from stretto.program.program import Program
from stretto.program.task import COPIES, Kind


def dependencies(program: Program, waits: Waits, *, transfers: bool) -> Iterator[Violation]:
    """Check all tasks, or all but transfers."""
    judged = np.append(~program.moving | transfers, True)  # index −1, no task, reads the last entry
    for task, need in required(program):
        yield from waits.missing(task, np.where(judged[task] & judged[need], need, -1))


def required(program: Program) -> Iterator[tuple[Ints, Ints]]:
    """Yield what training requires, in pairs of columns: tasks and what they need, −1 where there is none."""
    tables, anatomy = program.tables, program.anatomy
    forward, backward = tables.forward, tables.backward
    starts, results = tables.starts[:-1], tables.results[:-1]
    back_starts, back_results = tables.back_starts[:-1], tables.back_results[:-1]
    yield starts, tables.end(Kind.RECV_F)[:-1]
    yield starts[1:], results[:-1]
    yield back_starts, tables.end(Kind.RECV_B)[:-1]
    yield back_starts[:-1], back_results[1:]
    yield back_starts, results
    for a, b in pairwise(anatomy.forward_rows.tolist()):
        yield forward[a + 1 : b], forward[a : b - 1]
    for stage, (a, b) in enumerate(pairwise(anatomy.backward_rows.tolist())):
        yield backward[a + 1 : b], backward[a : b - 1]
        weights = slice(anatomy.weight_rows[stage], anatomy.weight_rows[stage + 1])
        yield tables.weight[weights], backward[a:b][list(anatomy.weight_steps[stage])]
    if program.work.among((Kind.RECOMPUTE, *COPIES)).any():
        offload, onload = tables.end(Kind.OFFLOAD)[:-1], tables.end(Kind.ONLOAD)[:-1]
        yield backward, tables.recompute
        yield offload, results
        yield onload, offload
        yield back_starts, onload
        yield backward[anatomy.first_compute_rows], onload
        for stage, (a, b) in enumerate(pairwise(anatomy.backward_rows.tolist())):
            for part in tables.recompute[a:b]:
                yield part, results[stage]
                yield part, onload[stage]
    yield tables.end(Kind.SEND_F)[:-1], results
    yield tables.end(Kind.SEND_B)[:-1], back_results

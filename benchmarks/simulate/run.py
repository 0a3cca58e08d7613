"""Seconds to plan, lower, simulate, measure and check; PyTorch's own schedule build beside it.

Each figure is the least of several runs, since other work on the machine only ever adds.
"""

import argparse
import platform
import resource
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import torch
from torch.distributed.pipelining import schedules as torch_schedules

import stretto
from stretto.costs import Link, PhaseTimes
from stretto.layers import MOE
from stretto.program.task import Kind
from stretto.schedules import interleaved

SIZES = [(4, 2, 64), (8, 2, 128), (8, 4, 256), (16, 4, 256), (16, 4, 512), (16, 4, 1024), (16, 4, 2048)]

PHASE_SIZES = [(8, 4, 128), (16, 4, 256), (16, 4, 512), (16, 4, 1024)]


def least(make: Callable[[], Any], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        make()
        best = min(best, time.perf_counter() - start)
    return best


def torch_order(devices: int, stages_per_device: int, microbatches: int) -> dict[int, list[Any]]:
    """What ScheduleInterleaved1F1B computes in its constructor, without the stages it asks for."""
    schedule = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
    schedule.__dict__.update(
        pp_group_size=devices,
        n_local_stages=stages_per_device,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // max(1, microbatches // devices),
    )
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(devices)}


def torch_lowered(devices: int, stages_per_device: int, microbatches: int) -> dict[int, list[Any]]:
    order = torch_order(devices, stages_per_device, microbatches)
    compute = {rank: [action for action in row if action is not None] for rank, row in order.items()}
    return torch_schedules._add_send_recv(compute, lambda stage: stage % devices, devices * stages_per_device)


def bare_replay(plan: stretto.Plan) -> Callable[[], float]:
    """The least a simulator must do: one loop over actions in a known good order, costs 1 and 2, nothing recorded.

    It tells how fast the machine is at the moment.
    """
    last = plan.stages - 1
    order = []
    for task in stretto.lower(plan).tasks():
        if task.kind in (Kind.F, Kind.B):
            forward = task.kind is Kind.F
            needs = (task.stage - 1, 0) if forward else (task.stage + 1, 1)
            key = (task.stage, int(not forward), task.microbatch)
            there = 0 <= needs[0] <= last
            order.append((task.device, key, (*needs, task.microbatch) if there else None, 1 if forward else 2))

    def replay() -> float:
        clock = [0] * plan.devices
        end: dict[tuple[int, int, int] | None, int] = {None: 0}
        for device, key, need, cost in order:
            end[key] = clock[device] = max(clock[device], end[need]) + cost
        return max(clock)

    return replay


def measure(devices: int, stages_per_device: int, microbatches: int, repeat: int) -> dict[str, float]:
    def plan() -> stretto.Plan:
        return interleaved(devices=devices, stages_per_device=stages_per_device, microbatches=microbatches)

    made = plan()
    program = stretto.lower(made)
    timeline = stretto.simulate(program)

    def whole() -> None:
        done = stretto.simulate(plan())
        done.summary()
        done.critical_path()

    return {
        "actions": 2 * devices * stages_per_device * microbatches,
        "tasks": len(program),
        "plan": least(plan, repeat),
        "lower": least(lambda: stretto.lower(made), repeat),
        "simulate": least(lambda: stretto.simulate(program), repeat),
        "metrics": least(lambda: (timeline.summary(), timeline.critical_path()), repeat),
        "all four": least(whole, repeat),
        "check": least(lambda: stretto.check(program), repeat),
        "bare loop": least(bare_replay(made), repeat),
        "torch order": least(lambda: torch_order(devices, stages_per_device, microbatches), min(repeat, 5)),
        "torch lowered": least(lambda: torch_lowered(devices, stages_per_device, microbatches), min(repeat, 3)),
    }


def measure_phases(devices: int, stages_per_device: int, microbatches: int, repeat: int) -> str:
    """The same with every pass in phases, one MoE layer per stage, recomputed, its activations sent to host memory."""
    plan = interleaved(devices=devices, stages_per_device=stages_per_device, microbatches=microbatches, overlap=True)
    layers = [[MOE]] * plan.stages
    times = {name: PhaseTimes(1, 1, 1) for name in ("attn", "mlp")}
    times |= {name: PhaseTimes(0.6, 0.6) for name in ("dispatch", "combine")}
    costs = stretto.Costs(phases=times, activation_bytes=1, recompute_bytes=0.2, host=Link(bandwidth=1))

    def lower() -> stretto.Program:
        return stretto.lower(plan, layers=layers, costs=costs, offload=1, recompute=True)

    program = lower()
    tasks = len(program)
    figures = {
        "lower": least(lower, repeat),
        "check": least(lambda: stretto.check(program), repeat),
        "simulate": least(lambda: stretto.simulate(program, costs), repeat),
    }
    cells = " | ".join(f"{seconds:.3f}" for seconds in figures.values())
    held, peak = memory(lambda: (program := lower(), stretto.check(program), stretto.simulate(program, costs)))
    per = 1e5 / tasks
    size = f"{devices} × {stages_per_device} × {microbatches}"
    return (
        f"| {size} | {tasks:,} | {cells} | {sum(figures.values()) * per:.2f} "
        f"| {held * per / 2**20:.0f} | {peak * per / 2**20:.0f} |"
    )


def memory(make: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that what is made holds, and that making it took at most."""
    tracemalloc.start()
    made = make()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return held, peak


def table_row(sizes: tuple[int, int, int], row: dict[str, float], names: list[str]) -> str:
    figures = (f"{row[name]:.1f}" if name in ("µs per action", "ratio") else f"{row[name]:.3f}" for name in names)
    return f"| {' × '.join(map(str, sizes))} | {row['actions']:,} | {row['tasks']:,} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="runs per figure, of which the least counts")
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, PyTorch {torch.__version__}"
    print(f"{date.today()}, {platform.machine()}, {versions}, least of {repeat} runs\n")
    names = ["plan", "lower", "simulate", "metrics", "all four", "µs per action", "check", "bare loop", "torch order"]
    names += ["torch lowered", "ratio"]
    print("| p × v × m | actions | tasks | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 3) + "|")
    for sizes in SIZES:
        row = measure(*sizes, repeat)
        row["µs per action"] = row["all four"] / row["actions"] * 1e6
        row["ratio"] = row["torch lowered"] / (row["plan"] + row["lower"])
        print(table_row(sizes, row, names), flush=True)
    print("\nIn phases, one MoE layer per stage, woven, offloaded and recomputed; MiB kept, and at most on the way:\n")
    print("| p × v × m | tasks | lower | check | simulate | s per 100k | MiB per 100k | at most |")
    print("|---|---|---|---|---|---|---|---|")
    for sizes in PHASE_SIZES:
        print(measure_phases(*sizes, min(repeat, 5)), flush=True)
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()

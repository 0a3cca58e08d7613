"""How long woven pairs take: against the published orders, a lower bound, and each lane's load in steady state."""

import argparse
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import zip_longest

from stretto.costs import PhaseTimes
from stretto.layers import EMBEDDING, EXPERT_PARALLEL_MOE, LOSS, MOE, Layer
from stretto.program.passes import Passes, Run, Step, Token, Weight
from stretto.program.weave import weave
from stretto.program.weave_bound import bound

Times = dict[str, PhaseTimes]


def deepseek(comm: float) -> Times:
    """Milliseconds of DeepSeek's public training trace, with communication times `comm`."""
    times = {"attn": PhaseTimes(4.36, 9.34, 2.39), "mlp": PhaseTimes(4.60, 5.31, 3.54)}
    times |= {"dispatch": PhaseTimes(6.69 * comm, 7.49 * comm), "combine": PhaseTimes(8.68 * comm, 5.77 * comm)}
    return times | others(4.36)


def kimi(comm: float) -> Times:
    """Ratios like those of Kimi K2 with its small expert-parallel groups, with communication times `comm`."""
    times = {"attn": PhaseTimes(3.0, 3.0, 3.0), "mlp": PhaseTimes(8.1, 8.1, 8.1)}
    times |= {name: PhaseTimes(4.7 * comm, 4.7 * comm) for name in ("dispatch", "combine")}
    return times | others(3.0)


def others(attn: float) -> Times:
    return {
        "counts": PhaseTimes(0.15),
        "sizes": PhaseTimes(0.1),
        "embedding": PhaseTimes(0.3 * attn, 0.0, 0.3 * attn),
        "loss": PhaseTimes(1.5 * attn, 1.5 * attn, 1.5 * attn),
    }


COSTS = {
    "DeepSeek": deepseek(1.0),
    "DeepSeek, comm × 0.5": deepseek(0.5),
    "DeepSeek, comm × 0.7": deepseek(0.7),
    "DeepSeek, comm × 2": deepseek(2.0),
    "K2": kimi(1.0),
    "K2, comm × 0.5": kimi(0.5),
    "K2, comm × 1.5": kimi(1.5),
    "K2, comm × 2": kimi(2.0),
}
STAGES = {
    "moe": ([MOE], []),
    "expert-parallel moe": ([EXPERT_PARALLEL_MOE], []),
    "with embedding": ([EMBEDDING, EXPERT_PARALLEL_MOE], []),
    "with loss": ([EXPERT_PARALLEL_MOE], [LOSS]),
}
"""What a stage is: its last layer of the first list is repeated."""


@dataclass(frozen=True)
class Block:
    """The tokens of one layer in one pass. Phases that the backward lacks come with the next one."""

    turns: list[list[Token]]
    is_moe: bool


def pair(layers: Sequence[Layer], times: Times) -> tuple[Passes, list[Block], list[Block]]:
    """Return a forward and a backward of one stage, and each layer's tokens in both."""
    forward: list[Step] = []
    backward: list[Step] = []
    weights: list[Weight] = []
    forwards: list[Block] = []
    backwards: list[Block] = []
    for layer in layers:
        turns: list[list[Token]] = [[]]
        for phase in layer.phases:
            turns[-1].append(Token("F", len(forward)))
            forward.append(Step(phase.lane, times[phase.name].F, phase.backward))
            turns += [[]] if phase.backward else []
        forwards.append(Block(turns[:-1], len(layer.phases) > 1))
    for layer in reversed(layers):
        turns = []
        for phase in reversed([phase for phase in layer.phases if phase.backward]):
            if phase.lane == "compute":
                weights.append(Weight(len(backward), times[phase.name].W))
            turns.append([Token("B", len(backward))])
            backward.append(Step(phase.lane, times[phase.name].I))
        backwards.append(Block(turns, len(layer.phases) > 1))
    return Passes(tuple(forward), tuple(backward), tuple(weights)), forwards, backwards


def published(passes: Passes, forwards: list[Block], backwards: list[Block], *, behind: bool) -> list[Token]:
    """Return Kimi K2's order, or DualPipe's with each weight gradient right behind its input gradient.

    Both alternate between the MoE layers of the two passes. What comes before and after them is run alone.
    """
    no_turn: list[Token] = []
    f, b = ([block.is_moe for block in blocks].index(True) for blocks in (forwards, backwards))
    order = [token for block in backwards[:b] + forwards[:f] for turn in block.turns for token in turn]
    for one, other in zip_longest(backwards[b:], forwards[f:], fillvalue=Block([], False)):
        for first, second in zip_longest(one.turns, other.turns, fillvalue=no_turn):
            order += first + second
    weights = {weight.after: Token("W", k) for k, weight in enumerate(passes.weights)}
    if not behind:
        return [*order, *weights.values()]
    follows = {Token("B", after): [weight] for after, weight in weights.items()}
    return [each for token in order for each in (token, *follows.get(token, ()))]


def period(passes: Passes, order: Sequence[Token]) -> float:
    """Return by how much each further pair in this order makes a row of pairs longer, if pairs need nothing else."""
    ends = []
    free = Run(passes).free
    for _ in range(6):
        run = Run(passes)
        run.free = free
        for token in order:
            run.place(token)
        free = run.free
        ends.append(max(free.values()))
    return (ends[-1] - ends[1]) / 4


def busiest(passes: Passes) -> float:
    """Return the load of the lane that has more to do."""
    steps = passes.forward + passes.backward
    compute, comm = (sum(step.time for step in steps if step.lane == lane) for lane in ("compute", "comm"))
    return max(compute + sum(weight.time for weight in passes.weights), comm)


def table_row(name: str, stage: str, layers: int, repeat: int) -> str:
    first, last = STAGES[stage]
    passes, forwards, backwards = pair([*first[:-1], *first[-1:] * layers, *last], COSTS[name])
    seconds = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        order = weave(passes)
        seconds = min(seconds, time.perf_counter() - start)
    length = passes.length(order)
    least = bound(passes, length=length)
    k2, dualpipe = (passes.length(published(passes, forwards, backwards, behind=behind)) for behind in (False, True))
    if length > min(k2, dualpipe) * (1 + 1e-9):
        raise SystemExit(f"{name}, {stage}, {layers} layers: {length} is longer than a published order")
    ratios = (k2 / length, dualpipe / length, length / least, period(passes, order) / busiest(passes))
    k2_more, dualpipe_more, gap, steady_gap = (f"{abs(ratio - 1):.1%}" for ratio in ratios)  # none is below 1
    figures = f"{seconds * 1e3:.1f} | {length:.1f} | {k2_more} | {dualpipe_more} | {least:.1f} | {gap} | {steady_gap}"
    return f"| {name} | {stage} | {layers} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs per figure, of which the least counts")
    repeat = parser.parse_args().repeat
    print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, least of {repeat} runs\n")
    names = ["costs", "stage", "layers", "ms", "length", "K2's order", "DualPipe's", "bound", "gap", "steady gap"]
    print("| " + " | ".join(names) + " |")
    print("|---" * len(names) + "|")
    for name in COSTS:
        for stage in STAGES:
            for layers in (1, 2, 4, 8):
                print(table_row(name, stage, layers, repeat), flush=True)


if __name__ == "__main__":
    main()

"""The exchange of rows between expert-parallel ranks beside a bare all-to-all of the same bytes:

python -m stretto onegpu run -d 4 benchmarks/moe/exchange.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import stretto.onegpu  # noqa: F401  (registers the backend)
from stretto.execute.members import Members
from stretto.execute.team import Team
from stretto.moe import AllToAll, ExpertRanks

REPEAT = 20


class Size(NamedTuple):
    tokens: int
    features: int
    experts: int
    chosen: int
    """The number of experts of each token."""


SIZES = {"kimi-k2": Size(4096, 7168, 384, 8), "moonlight": Size(4096, 2048, 64, 6)}


def routed(size: Size, skew: float) -> Tensor:
    weights = torch.arange(1, size.experts + 1, device="cuda").double() ** -skew
    return torch.multinomial(weights.expand(size.tokens, size.experts), size.chosen)


def timed(run: Callable[[], object]) -> float:
    """Return the shortest of some runs, in milliseconds, on the rank that takes longest."""
    best = float("inf")
    for _ in range(REPEAT):
        torch.cuda.synchronize()
        dist.barrier()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([first.elapsed_time(last)], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        best = min(best, float(slowest))
    return best


def measured(ranks: ExpertRanks, size: Size, skew: float) -> list[float]:
    """Return the times of a bare all-to-all, dispatch, dispatch in FP8, combine, and the backward of both."""
    x_TD = torch.randn(size.tokens, size.features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.rand(size.tokens, size.chosen, device="cuda", requires_grad=True)
    plain, fp8 = AllToAll(ranks), AllToAll(ranks, fp8=True)
    sized = plain.sizes(plain.count(routed(size, skew), size.experts))
    rows = torch.randn(size.tokens * size.chosen, size.features, device="cuda", dtype=torch.bfloat16)
    taken = rows.new_empty(sum(sized.arriving), size.features)
    arrived = plain.dispatch(x_TD, weights_TK, sized)
    out_TD = plain.combine(arrived.rows_RD, arrived.state, tokens=size.tokens, dtype=torch.bfloat16)
    outputs = arrived.rows_RD.detach().requires_grad_()
    ends = out_TD, arrived.weights_R
    grads = [torch.ones_like(end) for end in ends]
    return [
        timed(lambda: ranks.all_to_all(taken, rows, sized.arriving, sized.sent)),
        timed(lambda: plain.dispatch(x_TD, weights_TK, sized)),
        timed(lambda: fp8.dispatch(x_TD, weights_TK, sized)),
        timed(lambda: plain.combine(outputs, arrived.state, tokens=size.tokens, dtype=torch.bfloat16)),
        timed(lambda: torch.autograd.grad(ends, (x_TD, weights_TK), grads, retain_graph=True)),
    ]


def main() -> None:
    dist.init_process_group("onegpu")
    assert dist.group.WORLD is not None
    team = Team(Members.of_group(dist.group.WORLD), torch.device("cuda"), timeout=60)
    assert team.everybody is not None
    ranks = ExpertRanks(team, team.everybody)
    if team.rank == 0:
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {team.size} ranks; milliseconds")
        print("| sizes | skew | bare all-to-all | dispatch | in FP8 | combine | backward of both |")
        print("|---|---|---|---|---|---|---|")
    for name, size in SIZES.items():
        for skew in (0.0, 1.0):
            torch.manual_seed(team.rank)
            bare, *others = measured(ranks, size, skew)
            if team.rank == 0:
                columns = " | ".join(f"{time:.2f} ({time / bare:.1f} ×)" for time in others)
                print(f"| {name} | {skew:g} | {bare:.2f} | {columns} |", flush=True)
    team.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Experts on a GPU: forward, input and weight parts, beside a loop over experts and the plain products' own times.

    python benchmarks/moe/experts.py            # prints the tables of README.md

Times are by CUDA events, the minimum of many repetitions, everything queued beforehand. The floor is the sum of the
times of each expert's products, each timed by itself as one `torch.mm` repeated back to back.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.moe import Experts, RoutedExperts
from stretto.moe.grouped_linear import grouped_linear, grouped_outer
from stretto.moe.permutation import Permutation, combine, dispatch

SIZES = {"kimi-k2 / 12": (32, 7168, 2048, 8), "moonlight": (64, 2048, 1408, 6)}
"""Experts, features, hidden features, experts for each token."""


def timed(act: Callable[[], object], repeat: int = 20) -> float:
    """Return the milliseconds of one call on the device, the minimum of three series."""
    act()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # so that the host runs ahead
        start.record()
        for _ in range(repeat):
            act()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / repeat)
    return best


def routed(tokens: int, experts: int, top_k: int, skew: float) -> Tensor:
    """Choose distinct experts for each token, with probabilities that fall by a power of the expert's rank."""
    torch.manual_seed(0)
    popularity = torch.arange(1, experts + 1, device="cuda").float() ** -skew
    return torch.multinomial(popularity.expand(tokens, -1), top_k)


def floor(counts: list[int], out_features: int, in_features: int, kind: str) -> float:
    """Return the sum of the times of all experts' plain products, in milliseconds."""
    total, known = 0.0, dict[int, float]()
    for count in counts:
        if count and count not in known:
            x = torch.randn(count, in_features, device="cuda", dtype=torch.bfloat16)
            grad = torch.randn(count, out_features, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
            factors = {"forward": (x, weight.T), "input": (grad, weight), "weight": (grad.T, x)}[kind]
            known[count] = timed(partial(torch.mm, *factors))
        total += known.get(count, 0.0)
    return total


def multiplied(factors: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [one @ other for one, other in factors]


def looped(experts: Experts, x: Tensor, counts: list[int]) -> Tensor:
    """Run the experts one after the other, as a loop would."""
    parts = zip(torch.split(x, counts), experts.gate_up_proj, experts.down_proj, strict=True)
    outs = []
    for rows, up_weight, down_weight in parts:
        gate, up = (rows @ up_weight.T).chunk(2, -1)
        outs.append((F.silu(gate) * up) @ down_weight.T)
    return torch.cat(outs)


def products(name: str, tokens: int, skew: float) -> None:
    count, width, hidden, top_k = SIZES[name]
    order = Permutation.by_expert(routed(tokens, count, top_k, skew), experts=count)
    counts = order.counts_E.tolist()
    for label, out_features, in_features in (("gate_up", 2 * hidden, width), ("down", width, hidden)):
        x = torch.randn(sum(counts), in_features, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(sum(counts), out_features, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(count, out_features, in_features, device="cuda", dtype=torch.bfloat16)
        rows, grads = torch.split(x, counts), torch.split(grad, counts)
        acts: dict[str, tuple[Callable[[], object], list[tuple[Tensor, Tensor]]]] = {
            "forward": (
                partial(grouped_linear, x, weight, order.counts_E),
                [(part, matrix.T) for part, matrix in zip(rows, weight, strict=True)],
            ),
            "input": (
                partial(grouped_linear, grad, weight.transpose(1, 2), order.counts_E),
                list(zip(grads, weight, strict=True)),
            ),
            "weight": (
                partial(grouped_outer, grad, x, order.counts_E),
                [(part.T, other) for part, other in zip(grads, rows, strict=True)],
            ),
        }
        for kind, (grouped, factors) in acts.items():
            ours, theirs, least = (
                timed(grouped),
                timed(partial(multiplied, factors)),
                floor(counts, out_features, in_features, kind),
            )
            flops = 2 * sum(counts) * out_features * in_features
            print(
                f"| {name} | {skew:g} | {label} | {kind} | {ours:.3f} | {theirs:.3f} | {ours / theirs:.2f} | "
                f"{least:.3f} | {ours / least:.2f} | {flops / ours / 1e9:.0f} |",
                flush=True,
            )


def whole(name: str, tokens: int, skew: float) -> None:
    count, width, hidden, top_k = SIZES[name]
    indices = routed(tokens, count, top_k, skew)
    order = Permutation.by_expert(indices, experts=count)
    counts = order.counts_E.tolist()
    experts = RoutedExperts(count, width, hidden).cuda().bfloat16()
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    rows = dispatch(x, order).detach().requires_grad_()
    grad = torch.randn_like(x)

    row_grad, inputs = torch.randn_like(rows), [rows, *experts.parameters()]

    def both(run: Callable[[], Tensor]) -> object:
        return torch.autograd.grad(run(), inputs, row_grad)

    ours = timed(lambda: both(lambda: experts.run_sorted(grouped_linear, rows, order.counts_E)), 5)
    loop = timed(lambda: both(lambda: looped(experts, rows, counts)), 5)
    there = timed(lambda: Permutation.by_expert(indices, experts=count))
    sent = timed(lambda: dispatch(x, order))
    back = timed(lambda: combine(rows, order, tokens=tokens))
    copied = timed(lambda: rows.clone())
    total = timed(lambda: torch.autograd.grad(experts(x, indices, weights), [x, weights, *inputs[1:]], grad), 5)
    print(
        f"| {name} | {skew:g} | {ours:.2f} | {loop:.2f} | {ours / loop:.2f} | {there:.3f} | {sent:.3f} | {back:.3f} | "
        f"{copied:.3f} | {total:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    print(torch.cuda.get_device_name(), torch.__version__, f"{tokens} tokens, bfloat16")
    print("| sizes | skew | product | part | grouped, ms | loop, ms | ratio | floor, ms | ratio | TFLOP/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in SIZES:
        for skew in (0.0, 1.0):
            products(name, tokens, skew)
    print("| sizes | skew | forward + backward, ms | loop, ms | ratio | sort | dispatch | combine | plain copy | all |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in SIZES:
        for skew in (0.0, 1.0):
            whole(name, tokens, skew)


if __name__ == "__main__":
    main()

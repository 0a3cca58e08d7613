"""Weaving a pair: the published orders, and never longer than they are."""

from hypothesis import given
from hypothesis import strategies as st

from stretto.program.passes import Passes, Step, Token, Weight
from stretto.program.weave import weave

times = st.integers(0, 8).map(float)


def moe(*, attn: float, dispatch: float, mlp: float, combine: float, layers: int = 1) -> Passes:
    """A forward and a backward of as many MoE layers, weight gradients as long as their phase's forward."""
    forward = (Step("compute", attn), Step("comm", dispatch), Step("compute", mlp), Step("comm", combine))
    weights = [weight for n in range(layers) for weight in (Weight(4 * n + 1, mlp), Weight(4 * n + 3, attn))]
    return Passes(forward * layers, forward[::-1] * layers, tuple(weights))


def k2(layers: int) -> list[Token]:
    """Kimi K2's block for each pair of layers: comm of one pass beside compute of the other; WGrad at the end."""
    order = []
    for n in range(layers):
        for step in range(4):
            order += [Token("B", 4 * n + step), Token("F", 4 * n + step)]
    return order + [Token("W", k) for k in range(2 * layers)]


def dualpipe(layers: int) -> list[Token]:
    """DualPipe's: the same, each weight gradient right behind its input gradient."""
    order = []
    for token in k2(layers)[: 8 * layers]:
        order.append(token)
        if token.of == "B" and token.number % 4 in (1, 3):
            order.append(Token("W", token.number // 2))
    return order


NAMES = {
    "F": ("Attn.F", "EP-D.F", "MLP.F", "EP-C.F"),
    "B": ("EP-C.B", "MLP.B", "EP-D.B", "Attn.B"),
    "W": ("MLP.W", "Attn.W"),
}


def lanes(order: tuple[Token, ...]) -> tuple[list[str], list[str]]:
    names = [NAMES[of][number] for of, number in order]
    return [name for name in names if "EP" not in name], [name for name in names if "EP" in name]


def test_short_communication_gives_kimi_k2s_order() -> None:
    compute, comm = lanes(weave(moe(attn=1, dispatch=0.5, mlp=1, combine=0.5)))
    assert compute == ["Attn.F", "MLP.B", "MLP.F", "Attn.B", "MLP.W", "Attn.W"]
    assert comm == ["EP-C.B", "EP-D.F", "EP-D.B", "EP-C.F"]


def test_long_communication_gives_dualpipes_order() -> None:
    """As its figure, with ATTN.F and COMBINE.B as the prologue of a one-layer chunk."""
    compute, comm = lanes(weave(moe(attn=1, dispatch=2, mlp=1, combine=2)))
    assert compute == ["Attn.F", "MLP.B", "MLP.W", "MLP.F", "Attn.B", "Attn.W"]
    assert comm == ["EP-C.B", "EP-D.F", "EP-D.B", "EP-C.F"]


def test_all_communication_hides_where_it_can() -> None:
    passes = moe(attn=1, dispatch=1, mlp=1, combine=1, layers=4)
    assert passes.length(weave(passes)) == 24  # all compute and nothing else
    assert passes.length(k2(4)) == 24


@given(times, times, times, times, st.integers(1, 3))
def test_never_longer_than_the_published_orders(a: float, d: float, m: float, c: float, layers: int) -> None:
    passes = moe(attn=a, dispatch=d, mlp=m, combine=c, layers=layers)
    assert passes.length(weave(passes)) <= min(passes.length(k2(layers)), passes.length(dualpipe(layers)))


@st.composite
def any_passes(draw: st.DrawFn) -> Passes:
    """Chunks of different depth, dense layers beside MoE ones, anything."""
    steps = st.lists(st.builds(Step, st.sampled_from(["compute", "comm"]), times), min_size=1, max_size=9).map(tuple)
    backward = draw(steps)
    weights = [Weight(k, draw(times)) for k, step in enumerate(backward) if step.lane == "compute"]
    return Passes(draw(steps), backward, tuple(weights))


@given(any_passes())
def test_never_longer_than_one_pass_after_the_other(passes: Passes) -> None:
    forward = [Token("F", k) for k in range(len(passes.forward))]
    backward = [Token("B", k) for k in range(len(passes.backward))]
    weights = [Token("W", k) for k in range(len(passes.weights))]
    length = passes.length(weave(passes))
    assert length <= passes.length(forward + backward + weights)
    assert length <= passes.length(backward + weights + forward)
    for lane in ("compute", "comm"):
        steps = [step.time for step in passes.forward + passes.backward if step.lane == lane]
        assert length >= sum(steps) + (sum(weight.time for weight in passes.weights) if lane == "compute" else 0)


@given(any_passes())
def test_every_step_comes_once_and_in_its_passs_order(passes: Passes) -> None:
    order = weave(passes)
    assert [token.number for token in order if token.of == "F"] == list(range(len(passes.forward)))
    assert [token.number for token in order if token.of == "B"] == list(range(len(passes.backward)))
    assert sorted(token.number for token in order if token.of == "W") == list(range(len(passes.weights)))
    for place, token in enumerate(order):
        if token.of == "W":
            assert Token("B", passes.weights[token.number].after) in order[:place]


@given(any_passes())
def test_the_merge_of_two_chains_is_the_shortest_there_is(passes: Passes) -> None:
    """Without weight gradients, against every way to merge two short chains."""
    short = Passes(passes.forward[:5], passes.backward[:5])

    def merges(f: int, b: int) -> list[list[Token]]:
        if (f, b) == (len(short.forward), len(short.backward)):
            return [[]]
        found = []
        if f < len(short.forward):
            found += [[Token("F", f), *rest] for rest in merges(f + 1, b)]
        if b < len(short.backward):
            found += [[Token("B", b), *rest] for rest in merges(f, b + 1)]
        return found

    assert short.length(weave(short)) == min(short.length(order) for order in merges(0, 0))


@given(st.sampled_from([0.1, 3.0, 1e-6, 1e9]))
def test_the_unit_of_time_does_not_decide(unit: float) -> None:
    """Orders that are equally long but for rounding are equal, so the gradient's departure decides."""
    forward, backward, weights = (0.4, 0.6), (0.4, 0.3), (1.5, 1.0)

    def scaled(by: float) -> Passes:
        return Passes(
            tuple(Step("compute", time * by) for time in forward),
            tuple(Step("compute", time * by) for time in backward),
            tuple(Weight(k, time * by) for k, time in enumerate(weights)),
        )

    assert weave(scaled(unit)) == weave(scaled(1.0))
    order = weave(scaled(1.0))
    assert [token.of for token in order[-2:]] == ["W", "W"]

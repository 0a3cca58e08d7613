"""Dry runs: exact counts of what is saved, peaks that hold, and nothing that remains."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dry_run_jobs as jobs
from alive import Alive
from devices import device_ranks
from dry_run_jobs import DIM, HIDDEN, ROWS
from models import Case
from ranks import Ranks
from stretto.memory import Memory
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.memory_report import MemoryReport, RankMemory, SiteMemory, StageMemory
from stretto.pipeline.memory_sites import Decisions, find_sites
from stretto.pipeline.pytree import LEAF, Tree
from stretto.pipeline.rehearsal import Rehearsal
from stretto.pipeline.rng import RngKey
from stretto.pipeline.stage import Stage
from stretto.program.anatomy import Anatomy

RECOMPUTED = {"sites": {"*.norm": "recompute", "*.act": "recompute"}}
OFFLOADED = {"sites": {"*": "offload"}, "min_bytes": 0}
MIXED = {"sites": {"*norm": "recompute", "*": "offload"}, "min_bytes": 0}
BYTES = 8  # of a float64


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = device_ranks(4)
    yield made
    made.stop()


def counted(*sites: tuple[str, int, int, int]) -> tuple[SiteMemory, ...]:
    """Sites with these numbers for each row."""
    return tuple(SiteMemory(label, *(ROWS * BYTES * size for size in sizes)) for label, *sizes in sites)


def both(ranks: Ranks, *arguments: Any, **named: Any) -> MemoryReport:
    first, second = ranks.run(jobs.reported, 2, *arguments, **named)
    assert first == second
    return first  # type: ignore[no-any-return]


def test_all_is_kept_without_a_policy(ranks: Ranks) -> None:
    """Three layers for each stage, of which the first one's input is held by others."""
    report = both(ranks, {})
    layer = DIM + 2 + DIM + 4 * HIDDEN  # x; mean and 1/deviation; the norm's output; gate, up, SiLU(gate), product
    first, last = report.stages
    assert first.sites == counted(("mlp", 3 * layer - DIM, 0, 0))
    assert last.sites == counted(("mlp", 3 * layer - DIM, 0, 0), ("loss", DIM, 0, 0))
    for stage in report.stages:
        assert stage.pending == 3 * ROWS * BYTES * (DIM + HIDDEN + 2 * HIDDEN + DIM)  # inputs, gradients of outputs
        assert (stage.brought_back, stage.host, stage.inputs) == (0, 0, ROWS * BYTES * DIM)
    assert (first.input_gradients, last.input_gradients) == (0, ROWS * BYTES * DIM)
    assert report.ranks[0].activations == 4 * first.activations
    assert report.has_loss


def test_recomputed_sites_keep_their_inputs(ranks: Ranks) -> None:
    first, _ = both(ranks, RECOMPUTED).stages
    assert first.sites == counted(
        ("mlp.norm", 2 * DIM, 3 * (2 + DIM), 0), ("mlp.act", 3 * 2 * HIDDEN, 3 * 2 * HIDDEN, 0)
    )
    assert first.brought_back == ROWS * BYTES * 2 * HIDDEN  # SiLU(gate) and the product of one layer


def test_a_layer_that_is_recomputed_keeps_its_input_only(ranks: Ranks) -> None:
    first, _ = both(ranks, {"sites": {"*": "recompute"}}).stages
    layer = 2 + DIM + 4 * HIDDEN
    assert first.sites == counted(("mlp", 2 * DIM, 3 * layer, 0))
    assert first.brought_back == ROWS * BYTES * layer


def test_what_leaves_is_what_the_policy_lets_leave(ranks: Ranks) -> None:
    layer = DIM + 2 + DIM + 4 * HIDDEN
    every = both(ranks, OFFLOADED).stages[0]
    assert every.sites == counted(("mlp", 0, 0, 3 * layer - DIM))
    assert every.host % 512 == 0
    assert 0 <= every.host - every.offloaded < 512 * 3 * 9
    large = both(ranks, {**OFFLOADED, "min_bytes": ROWS * BYTES * DIM}).stages[0]
    assert large.sites == counted(("mlp", 3 * 2, 0, 3 * (layer - 2) - DIM))
    without_last = both(ranks, {**OFFLOADED, "keep_layers": 1}).stages[0]
    assert without_last.sites == counted(("mlp", layer, 0, 2 * layer - DIM))
    half = both(ranks, {**OFFLOADED, "fraction": 0.5}).stages[0]
    assert 0 < half.offloaded <= every.offloaded // 2
    assert half.activations == every.activations
    few = both(ranks, {**OFFLOADED, "max_in_flight": ROWS * BYTES * HIDDEN}).stages[0]
    assert 0 < few.offloaded <= ROWS * BYTES * HIDDEN
    assert both(ranks, {**OFFLOADED, "fraction": 0.0}).ranks[0].host == 0


def test_without_targets_the_loss_is_left_out(ranks: Ranks) -> None:
    first, second = ranks.run(without_targets, 2)
    assert first == second
    assert not first.has_loss
    assert [site.label for site in first.stages[1].sites] == ["mlp"]
    assert "What one microbatch saves, without the loss, since there were no targets:" in str(first)


def without_targets(mesh: Any) -> MemoryReport:
    return jobs.reported(mesh, {}, targets=False)


@settings(deadline=None, max_examples=40)
@given(
    dim=st.integers(1, 6),
    hidden=st.integers(1, 9),
    rows=st.integers(1, 7),
    layers=st.integers(1, 3),
    actions=st.tuples(*[st.sampled_from(["keep", "recompute", "offload"])] * 3),
)
def test_what_is_counted_is_what_is_alive(
    dim: int, hidden: int, rows: int, layers: int, actions: tuple[Any, Any, Any]
) -> None:
    modules = dict(enumerate(jobs.mlps(layers, dim, hidden)))
    policy = Memory(sites=dict(zip(("*.norm", "*.act", "*"), actions, strict=True)), min_bytes=0)
    sites = find_sites(Decisions(policy), modules, in_phases=False)
    stage = Stage(modules, Anatomy.whole(1), 0, gradients=Gradients(), sites=sites, memory=policy)
    rehearsal, x = Rehearsal(stage, 0, leaves=True, receives=True, hands_on=False), jobs.inputs_of(1, rows, dim)
    with rehearsal.running(RngKey(), training=False), Alive() as alive:
        rehearsal.evaluate(0, 0, Tree([x], LEAF, [True]))
        held = alive.bytes(nn.ModuleList(modules.values()), [x])
    assert rehearsal.memory is not None
    assert rehearsal.memory.activations == held


@pytest.mark.parametrize("policy", [{}, MIXED, {"sites": {"*": "recompute"}}], ids=["kept", "mixed", "recomputed"])
@pytest.mark.parametrize("phased", [False, True], ids=["whole", "phases"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "dualpipe", "zb_v"])
def test_steps_after_dry_runs_are_the_same_to_the_bit(
    ranks: Ranks, schedule: str, phased: bool, policy: dict[str, Any]
) -> None:
    case = Case(schedule, 2, 6, layers=10, phased=phased, dropout=0.3, dtype=torch.float32)
    (wrong, report), *others = ranks.run(jobs.as_without, 2, case, policy)
    assert wrong == []
    assert others == [(wrong, report)]
    assert [stage.stage for stage in report.stages] == list(range(case.plan().stages))
    labels = {site.label for stage in report.stages for site in stage.sites}
    assert {"attn", "mlp"} <= labels if phased and policy is MIXED else labels
    if policy is MIXED:
        assert sum(site.offloaded for stage in report.stages for site in stage.sites)
    if policy:
        assert sum(site.recomputed for stage in report.stages for site in stage.sites)


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
@pytest.mark.parametrize("steps", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("gradients", ["cast", "float32"])
def test_nothing_remains(ranks: Ranks, gradients: str, steps: int, fails: bool) -> None:
    assert ranks.run(jobs.remains, 2, gradients, steps, fails) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "dualpipe"])
def test_weights_gradients_buffers_and_host_memory_are_those_of_a_step(
    ranks: Ranks, schedule: str, dtype: torch.dtype
) -> None:
    for predicted, real in ranks.run(jobs.measured, 2, schedule, MIXED, dtype):
        assert predicted == real


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [("one_f_one_b", {}), ("dualpipe", RECOMPUTED), ("zb_v", {"sites": {"*": "recompute"}}), ("gpipe", OFFLOADED)],
    ids=["kept", "recomputed", "layers recomputed", "offloaded"],
)
def test_no_step_holds_more_than_predicted(ranks: Ranks, schedule: str, policy: dict[str, Any]) -> None:
    """Between tasks, where nothing is brought back, and no bytes but those of losses and messages on their way."""
    for predicted, real in ranks.run(jobs.peaks, 2, schedule, policy):
        assert 0.65 * predicted < real < 1.02 * predicted


def test_peaks_within_a_backward_are_those_of_a_step(ranks: Ranks) -> None:
    """It frees what it has used while it recomputes and while weight gradients wait, which are most of it here."""
    for policy in ({}, {"*.norm": "recompute"}, {"*.act": "recompute"}, {"*": "recompute"}):
        ((predicted, real),) = ranks.run(jobs.within_tasks, 1, {"sites": policy})
        assert 0.9 * predicted < real < 1.1 * predicted, policy


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v", "dualpipev"])
def test_what_stages_of_one_rank_hand_on_is_held(ranks: Ranks, schedule: str) -> None:
    ((predicted, real),) = ranks.run(jobs.passing_on, 1, schedule)
    assert 0.85 * predicted < real < 1.1 * predicted, real / predicted


@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"pp": 2, "dp": 2}, {"ep": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("policy", [{}, MIXED], ids=["kept", "mixed"])
@pytest.mark.parametrize("schedule", ["dualpipe", "interleaved"])
def test_meshes(ranks: Ranks, schedule: str, policy: dict[str, Any], sizes: dict[str, int]) -> None:
    if schedule == "dualpipe" and "pp" not in sizes:
        schedule = "one_f_one_b"  # DualPipe needs two devices
    results = ranks.run(jobs.on_mesh, 4, sizes, schedule, policy)
    _, report, *_ = results[0]
    assert [rank.rank for rank in report.ranks] == [0, 1, 2, 3]
    for rank, (wrong, other, weights) in enumerate(results):
        assert wrong == []
        assert other == report
        assert other.ranks[rank].weights == weights
    labels = [site.label for site in report.stages[0].sites]
    assert {"attn", "mlp"} & {label.partition(".")[0] for label in labels}, labels


REFUSED = {
    "host_bytes": "offloading takes 6.29 MB of host memory on rank {rank} (3 buffers of 2.1 MB for passes of stage "
    "{rank}); host_bytes allows 1.05 MB",
    "machine": "offloading takes 6.29 MB of host memory on rank {rank} (3 buffers of 2.1 MB for passes of stage "
    "{rank}); its machine has 1.05 MB left",
    "ranks of a machine": "offloading takes 12.6 MB more of host memory on ranks 0, 1, which share a machine that has "
    "10.5 MB left",
    "lazy": "0 gets its parameters in its first forward; run that before a dry run",
    "clips": "a forward changes the parameter 'weight' of shape (8, 8) in place, which a dry run cannot undo",
    "some targets": "rank 3 was given no targets, but another rank that runs the last stage was",
    "no gradients": "dry_run() needs gradients, which are off here (torch.no_grad)",
    "no inputs": "rank 0 runs stage 0 and needs inputs",
}


@pytest.mark.parametrize("how", REFUSED)
def test_refused(ranks: Ranks, how: str) -> None:
    said = ranks.run(jobs.refused, 4 if how == "some targets" else 2, how)
    assert any(REFUSED[how].format(rank=rank) in text for rank, text in enumerate(said)), said
    assert "nothing" not in said


@pytest.mark.parametrize("how", ["host_bytes", "machine"])
def test_a_dry_run_refuses_what_the_first_step_would(ranks: Ranks, how: str) -> None:
    """In the same words, on a rank that has them from itself and not from the other."""
    dry, step = (ranks.run(jobs.refused, 2, how, steps) for steps in (False, True))
    own = [(a, b) for a, b in zip(dry, step, strict=True) if a.startswith("off") and b.startswith("off")]
    assert own, (dry, step)
    assert all(a == b for a, b in own)


def test_a_report_prints_two_tables() -> None:
    sites = SiteMemory("attn", 3_000_000, 0, 21_000_000), SiteMemory("mlp.experts", 512, 1_540_000, 0)
    stages = (StageMemory(0, sites, 1, 2, 3, 4, 5, 6), StageMemory(1, sites[:1], 1, 2, 3, 4, 5, 6))
    report = MemoryReport(
        stages,
        (RankMemory(0, 10**9, 2 * 10**9, 3 * 10**7, 10**6, 0, 5 * 10**10, (0, 1)),),
        has_loss=True,
        memory=Memory(),
    )
    assert (
        str(report)
        == """\
What one microbatch saves:
stage  site              kept  recomputed  offloaded
0      attn              3 MB           0      21 MB
       mlp.experts  512 bytes     1.54 MB          0
1      attn              3 MB           0      21 MB

What a step takes at its peak:
rank  weights  gradients  activations  buffers      sum  host memory
0        1 GB       2 GB        30 MB        0  3.03 GB        50 GB"""
    )
    assert stages[0].activations == 24_000_512


def test_a_report_says_why_nothing_is_offloaded() -> None:
    def said(offloaded: int = 0, **policy: Any) -> str:
        stage = StageMemory(0, (SiteMemory("attn", 512, 0, offloaded),), 1, 2, 3, 4, 5, 6)
        return str(MemoryReport((stage,), (), has_loss=True, memory=Memory(**policy)))

    sites = {"*": "offload"}
    begin, end = "Nothing is offloaded: what the policy names is held by others anyway", "and come back (copy_actions)."
    assert "Nothing" not in said(sites={"*": "recompute"})
    assert "Nothing" not in said(sites=sites, offloaded=512)
    assert "Nothing is offloaded: fraction is 0.\n" in said(sites=sites, fraction=0)
    usual = said(sites=sites)
    assert begin in usual
    assert end in usual
    assert "smaller than min_bytes (1.05 MB; set min_bytes=0 to try a policy on a small model)" in usual
    assert not any(name in usual for name in ("fraction", "max_in_flight", "keep_layers"))
    assert "min_bytes" not in said(sites=sites, min_bytes=0)
    assert "keep_layers names" in said(sites=sites, keep_layers=2)
    assert "more than max_in_flight or fraction allows" in said(sites=sites, max_in_flight=5)

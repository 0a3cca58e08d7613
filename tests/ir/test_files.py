"""Plans, costs and sizes, written and read again."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.costs import BucketTimes, Link, PhaseTimes, SharedResource, WovenTimes
from stretto.ir.units import bytes_text, parse_bytes


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_plans(tmp_path: Path, ending: str) -> None:
    plan = stretto.schedules.dualpipe(devices=4, microbatches=8)
    plan.save(tmp_path / f"plan.{ending}")
    assert stretto.load_plan(tmp_path / f"plan.{ending}") == plan


@given(plans())
def test_any_plan_as_json(tmp_path_factory: pytest.TempPathFactory, plan: stretto.Plan) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    plan.save(path)
    assert stretto.load_plan(path) == plan


COSTS = {
    "defaults": stretto.Costs(),
    "seconds": stretto.Costs(unit="s", F=(0.1, 0.2), I=0.1, W=0.3),
    "numpy": stretto.Costs(F=np.float64(1.5), I=(np.float64(1), 2.0)),
    "optional": stretto.Costs(B=3, FB=2.5, R=0.5, slowdown=(1.0, 1.5), activation_bytes=2e9, pending_bytes=(1.0, 2.0)),
    "nested": stretto.Costs(
        link=Link(latency=1e-5, bandwidth=5e10),
        links={"3>4": Link(latency=2.0)},
        phases={"moe.mlp": PhaseTimes(F=1, I=2, W=3), "attn": PhaseTimes(F=0.1)},
        woven={"mlp": WovenTimes(F=1.5, I=2.5, W=3.5, R=0.5), "attn": WovenTimes(I=0.25)},
        calls={"load": 2.0},
        bucket=BucketTimes(h2d=3, broadcast=1.2, reload=1),
        shared={"pcie": SharedResource(lanes={"h2d": 1.0, "d2h": 0.5}, capacity=1.5)},
    ),
}


@pytest.mark.parametrize("name", sorted(COSTS))
def test_costs(tmp_path: Path, name: str) -> None:
    COSTS[name].save(tmp_path / "costs.toml")
    assert stretto.load_costs(tmp_path / "costs.toml") == COSTS[name]


def test_fitted_costs(tmp_path: Path) -> None:
    plan = stretto.schedules.zb_h1(devices=2, microbatches=4)
    fitted = stretto.fit(stretto.simulate(plan, stretto.Costs(F=0.1, I=0.2, W=0.3, unit="s")))
    fitted.save(tmp_path / "fitted.toml")
    assert stretto.load_costs(tmp_path / "fitted.toml") == fitted


def test_bad_paths_are_named(tmp_path: Path) -> None:
    plan, costs = stretto.schedules.gpipe(devices=1, microbatches=1), stretto.Costs()
    for save, path, says in (
        (plan.save, "x.txt", "a plan is saved as .csv or .json"),
        (costs.save, "x.json", "costs are saved as .toml"),
        (stretto.simulate(plan).save, "x.pdf", "a timeline is saved as .svg, .png or .trace.json"),
        (plan.save, "none/x.csv", "cannot write .*none/x.csv: No such file"),
    ):
        with pytest.raises(stretto.StrettoError, match=says):
            save(tmp_path / path)
    (tmp_path / "bad").write_text("F = nonsense")
    for load in (stretto.load_plan, stretto.load_costs, stretto.load_timeline):
        with pytest.raises(stretto.StrettoError, match="bad: "):
            load(tmp_path / "bad")
        with pytest.raises(stretto.TextError, match=r"cannot read .*none: No such file"):
            load(tmp_path / "none")


def test_what_cannot_be_a_path_is_refused() -> None:
    plan, costs = stretto.schedules.gpipe(devices=1, microbatches=1), stretto.Costs()
    users = (stretto.load_plan, stretto.load_costs, stretto.load_timeline, plan.save, costs.save)
    for use in (*users, stretto.simulate(plan).save):
        for path in (None, "a\0.csv", 3):
            with pytest.raises(stretto.TextError, match="is not the path of a file"):
                use(path)


@given(st.floats(1, 1e20))
def test_sizes_are_read_as_they_are_written(nbytes: float) -> None:
    assert parse_bytes(bytes_text(nbytes).replace("bytes", "B")) == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "nan", "inf", "1e999", "0x10", "1GB/s", "١GB", "50Gb"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(stretto.TextError, match="a size is a number of bytes"):
        parse_bytes(text)

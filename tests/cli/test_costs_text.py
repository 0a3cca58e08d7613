import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto.costs import PhaseTimes, WovenTimes, costs_from, parse_costs, parse_costs_toml
from stretto.schedules import gpipe

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
_NAMES = st.sampled_from(
    ["F", "B", "I", "W", "FB", "BW", "slowdown", "link", "links", "woven", "activation_bytes", "x"]
)


@given(
    st.text()
    | st.lists(st.tuples(_NAMES, st.floats() | st.text(max_size=4))).map(lambda p: ",".join(f"{a}={b}" for a, b in p))
)
def test_any_short_form_is_read_or_refused(text: str) -> None:
    try:
        table = parse_costs(text)
        makespan = stretto.simulate(gpipe(devices=1, microbatches=1), table).makespan
    except stretto.CostError as error:
        assert "\n" not in str(error).strip()
    else:
        assert 0 <= makespan < math.inf


_TOML_VALUE = st.sampled_from(
    ["1", "-1", "1.5", "nan", "inf", "[1, 2]", "[]", '"x"', "true", "9" * 5000, "{}", "=", "[[1]]"]
)


@given(st.text() | st.lists(st.tuples(_NAMES, _TOML_VALUE)).map(lambda p: "\n".join(f"{a} = {b}" for a, b in p)))
def test_any_toml_is_read_or_refused(text: str) -> None:
    try:
        makespan = stretto.simulate(gpipe(devices=2, microbatches=1), parse_costs_toml(text)).makespan
    except stretto.CostError:
        return
    assert 0 <= makespan < math.inf


@given(st.dictionaries(_NAMES, _VALUES, max_size=4))
def test_any_table_is_read_or_refused(table: dict[str, object]) -> None:
    try:
        found = costs_from(table)
        stretto.simulate(gpipe(devices=2, microbatches=1), found)
    except stretto.CostError:
        return
    assert set(table) <= set(stretto.Costs.__struct_fields__)


def test_b_defaults_to_i_and_w_and_a_pair_to_both_passes() -> None:
    table = parse_costs("F=1,I=2,W=3")
    assert table.per_stage("B", stages=2).tolist() == [5, 5]
    assert table.per_stage("FB", stages=1).tolist() == [6]


def test_the_same_model_in_more_stages_costs_the_same() -> None:
    table = stretto.Costs(F=(2.0, 4.0), B=4, activation_bytes=8, message_bytes=6).for_stages(4, devices=2)
    assert (table.F, table.B, table.activation_bytes, table.message_bytes) == ((1.0, 1.0, 2.0, 2.0), 2.0, 4.0, 6)
    merged = stretto.Costs(F=(1.0, 2.0, 3.0, 4.0)).for_stages(2, devices=2)
    assert merged.F == (3.0, 7.0)
    same = stretto.Costs(F=0.1, W=(0.1, 0.2, 0.3))
    assert same.for_stages(3, devices=5) == same
    assert stretto.Costs(F=0.1).for_stages(3, devices=3) == stretto.Costs(F=0.1)
    uneven = stretto.Costs(F=(3.0, 6.0)).for_stages(3, devices=3)
    assert pytest.approx((2.0, 3.0, 4.0)) == uneven.F


@pytest.mark.parametrize("text", ["F=1e400", "F=inf"])
def test_infinite_costs_are_refused(text: str) -> None:
    with pytest.raises(stretto.CostError, match="at least 0"):
        parse_costs(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("unit=s,F=0.01", "times in seconds have no defaults: give I too"),
        ("unit=s", "times in seconds have no defaults: give F too"),
        ("unit=ms,F=1", "unit is s if times are seconds, or left out (got 'ms')"),
    ],
)
def test_seconds_have_no_defaults(text: str, says: str) -> None:
    plan = gpipe(devices=2, microbatches=1)
    with pytest.raises(stretto.CostError, match=re.escape(says)):
        stretto.simulate(plan, parse_costs(text))
    with pytest.raises(stretto.CostError, match="give F too"):
        stretto.simulate(plan, parse_costs_toml('unit = "s"\n[calls]\nx = 1'))
    assert stretto.simulate(plan, parse_costs("unit=s,F=0.01,B=0.02")).makespan == pytest.approx(0.06)
    assert parse_costs("unit=s,F=0.01,I=0.01,W=0.01").unit == "s"
    assert parse_costs_toml('unit = "s"\n[bucket]\nh2d = 0.1').unit == "s"


def test_times_in_pairs_are_a_table_of_their_own() -> None:
    table = parse_costs_toml("[phases]\nattn = { F = 1.0, W = 0.5 }\n[woven]\n'moe.attn' = { F = 1.5 }\n")
    assert table.phases == {"attn": PhaseTimes(F=1.0, W=0.5)}
    assert table.woven == {"moe.attn": WovenTimes(F=1.5)}


@pytest.mark.parametrize(
    ("woven", "says"),
    [
        ({"atn": WovenTimes(1)}, "woven has times of 'atn' in pairs, but phases has none of it outside of pairs"),
        ({"moe.atn": WovenTimes(1)}, "woven has times of 'moe.atn' in pairs"),
        ({"attn": WovenTimes(-1)}, "woven.attn.F must be a number of at least 0 (got -1)"),
        ({"attn": WovenTimes(R=math.nan)}, "woven.attn.R must be a number of at least 0 (got nan)"),
        ({"attn": WovenTimes(W="1")}, "woven.attn.W must be a number of at least 0 (got '1')"),
        ({"attn": 2}, "woven.attn must be WovenTimes (got 2)"),
        ({"attn": PhaseTimes(1)}, "woven.attn must be WovenTimes (got PhaseTimes(F=1"),
        ({1: WovenTimes(1)}, "woven is a table with names as keys"),
        ([], "woven is a table with names as keys (got [])"),
    ],
)
def test_wrong_times_in_pairs_are_refused(woven: Any, says: str) -> None:
    with pytest.raises(stretto.CostError, match=re.escape(says)):
        stretto.Costs(phases={"attn": PhaseTimes(1)}, woven=woven)
    with pytest.raises(stretto.CostError, match=re.escape(says)):
        stretto.Costs(phases={"dense.attn": PhaseTimes(1)}, woven=woven)


def test_times_in_pairs_need_times_outside_of_pairs() -> None:
    with pytest.raises(stretto.CostError, match="phases has none of it"):
        stretto.Costs(woven={"attn": WovenTimes(1)})
    with pytest.raises(stretto.CostError, match=r"cost woven is given in a TOML file \(--costs costs.toml\)"):
        parse_costs("woven=1")

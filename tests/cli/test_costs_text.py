import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto.costs import costs_from, parse_costs, parse_costs_toml

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
_NAMES = st.sampled_from(["F", "B", "I", "W", "FB", "BW", "slowdown", "link", "links", "activation_bytes", "x"])


@given(
    st.text()
    | st.lists(st.tuples(_NAMES, st.floats() | st.text(max_size=4))).map(lambda p: ",".join(f"{a}={b}" for a, b in p))
)
def test_any_short_form_is_read_or_refused(text: str) -> None:
    try:
        table = parse_costs(text)
    except stretto.CostError as error:
        assert "\n" not in str(error).strip()
    else:
        assert stretto.simulate(stretto.gpipe(devices=1, microbatches=1), table).makespan >= 0


@given(st.text())
def test_any_toml_is_read_or_refused(text: str) -> None:
    try:
        table = parse_costs_toml(text)
    except stretto.CostError:
        return
    assert table == stretto.Costs()


@given(st.dictionaries(_NAMES, _VALUES, max_size=4))
def test_any_table_is_read_or_refused(table: dict[str, object]) -> None:
    try:
        found = costs_from(table)
        stretto.simulate(stretto.gpipe(devices=2, microbatches=1), found)
    except stretto.CostError:
        return
    assert set(table) <= set(stretto.Costs.__struct_fields__)


def test_b_defaults_to_i_and_w_and_a_pair_to_both_passes() -> None:
    table = parse_costs("F=1,I=2,W=3")
    assert table.stage_times("B", stages=2).tolist() == [5, 5]
    assert table.stage_times("FB", stages=1).tolist() == [6]


def test_dividing_keeps_messages() -> None:
    table = stretto.Costs(F=(2.0, 4.0), B=4, activation_bytes=8, message_bytes=6).divided(2)
    assert (table.F, table.B, table.activation_bytes, table.message_bytes) == ((1.0, 2.0), 2.0, 4.0, 6)


@pytest.mark.parametrize("text", ["F=1e400", "F=inf"])
def test_infinite_costs_are_refused(text: str) -> None:
    with pytest.raises(stretto.CostError, match="at least 0"):
        parse_costs(text)

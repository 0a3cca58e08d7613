import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.ir.text import parse_plan, parse_plan_json, parse_rows, plan_to_json
from stretto.schedules import dualpipe, forward_only


@given(plans())
def test_print_then_parse_is_identity(plan: stretto.Plan) -> None:
    assert parse_plan(str(plan)) == plan
    assert parse_plan_json(plan_to_json(plan)) == plan
    assert parse_plan(str(forward_only(plan))) == forward_only(plan)


def test_a_bidirectional_plan_shows_the_models_stages() -> None:
    rows = str(dualpipe(devices=8, microbatches=20)).split("\n")
    assert rows[0].startswith("0F0,0F1,0F2,0F3,0F4,0F5,0F6,7F10,7I10,7W10,")
    assert [row for row in rows if "7F10" in row] == [rows[0]]
    assert [row for row in rows if "7F0," in row] == [rows[7]]


def test_pytorchs_sharding_actions_and_gaps_are_left_out() -> None:
    text = "0UNSHARD,0F0,,0B0,0RESHARD,0REDUCE_GRAD\r\n,1F0,1B0,\r\n"
    assert str(parse_plan(text)) == "0F0,0B0\n1F0,1B0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the text is empty"),
        ("\n\n", "the text is empty"),
        ("0F0,,\n,,\n1F0", "line 2 is empty"),
        ("0F0,F1", "line 1: 'F1' is not an action"),
        ("0F0,-1F0", "'-1F0' is not an action"),
        ("0F0\n1Q0", "line 2: '1Q0' is not an action"),
        ("(0F0;0F1)OVERLAP_F_B", "must pair a forward with a full backward"),
        ("(0F0;0B0;0B1)OVERLAP_F_B", "is not an action"),
        ("((((((((", "is not an action"),
        ("0F99999999", "is not an action"),
        ("0F9999999,0B0", "is an index mistyped?"),
        ("0F0,9F0\n2F0", "stage 1 never appears"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0", "a plan holds compute actions only"),
        ("٠F٠", "is not an action"),
    ],
)
def test_bad_text_is_refused_in_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(stretto.StrettoError, match=r".") as caught:
        parse_plan(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


_CELL = st.from_regex(r"\(?[0-9]{0,3}(F|B|I|W|SEND_F|RECV_B|UNSHARD)?[0-9]{0,3}[;)]?(OVERLAP_F_B)?", fullmatch=True)


@given(st.text() | st.lists(st.lists(_CELL, max_size=6).map(",".join), max_size=4).map("\n".join))
@example("0F0,0B0\n" * 50)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        rows = parse_rows(text)
    except stretto.StrettoError as error:
        assert "\n" not in str(error)
        return
    assert all(rows)
    try:
        program = stretto.parse_program(text)
    except stretto.StrettoError as error:
        assert "\n" not in str(error)
        return
    for violation in stretto.check(program):
        assert violation.message


@given(
    st.text()
    | st.recursive(
        st.integers() | st.text() | st.none(),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["rows", "routes", "microbatches"]), x),
    ).map(lambda value: json.dumps(value))
)
def test_any_json_is_refused_unless_it_is_a_plan(text: str) -> None:
    with pytest.raises(stretto.StrettoError):
        parse_plan_json(text)


@given(plans(devices=3, microbatches=4), st.data())
def test_damaged_json_is_read_or_refused(plan: stretto.Plan, data: st.DataObject) -> None:
    text = plan_to_json(plan)
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", "0", "9", "F", "W", '"', "[", "]", ","])) + text[at + 1 :]
    try:
        damaged = parse_plan_json(text)
        stretto.check(damaged)
    except stretto.StrettoError as error:
        assert "\n" not in str(error)
        return
    assert damaged.devices == plan.devices


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"rows": [["0F0"]], "routes": [[1]], "microbatches": 1}', "speaks of 2 devices, but there are 1 rows"),
        ('{"rows": [["0F0,0F1"]], "routes": [[0]], "microbatches": 1}', "'0F0,0F1' is not an action"),
        ('{"rows": [["0F0"]], "routes": [[0]], "microbatches": 999999}', "but only a few actions"),
        ('{"rows": [["0SEND_F0"]], "routes": [[0]], "microbatches": 1}', "a plan holds compute actions only"),
        ('{"rows": [[]], "routes": [[0]], "microbatches": 1}', "a plan needs at least one action"),
    ],
)
def test_bad_json_is_refused(text: str, says: str) -> None:
    with pytest.raises(stretto.StrettoError) as caught:
        parse_plan_json(text)
    assert says in str(caught.value)


def test_json_says_what_csv_can_only_guess() -> None:
    """With the last microbatch missing everywhere, CSV shows a smaller plan; JSON knows better."""
    text = '{"rows": [["0F0", "0B0"]], "routes": [[0]], "microbatches": 2}'
    found = [str(violation) for violation in stretto.check(parse_plan_json(text))]
    assert "coverage: 0F1 never runs" in found

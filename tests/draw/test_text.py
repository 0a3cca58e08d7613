import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from strategies import plans
from stretto.costs import BucketTimes
from stretto.draw import draw_rich, draw_text
from stretto.schedules import dualpipe, gpipe


def test_a_task_says_its_op_and_microbatch() -> None:
    timeline = stretto.simulate(dualpipe(devices=4, microbatches=8))
    assert draw_text(timeline, width=90).split("\n") == [
        "0 F0─F1─F2─F4─I4─W4─F5─F3&B5────···F6&B0────B6────···F7&B1────B7────I2─W2─I3─W3─",
        "1 ···F0─F4─F1─F5─F2─B4────F6&B0────F3&B5────F7&B1────B6────B2────···I7─I3─W7─W3─",
        "2 ···F4─F0─F5─F1─F6─B0────F2&B4────F7&B1────F3&B5────B2────B6────···I3─I7─W3─W7─",
        "3 F4─F5─F6─F0─I0─W0─F1─F7&B1────···F2&B4────B2────···F3&B5────B3────I6─W6─I7─W7─",
    ]


def test_weight_parts_show_when_they_take_time() -> None:
    timeline = stretto.simulate(gpipe(devices=1, microbatches=1), stretto.Costs(BW=1))
    assert draw_text(timeline, width=40) == "0 F0──B0──W0──"


@given(plans(microbatches=40), st.integers(20, 200))
def test_it_fits_the_width(plan: stretto.Plan, width: int) -> None:
    timeline = stretto.simulate(plan)
    lines = draw_text(timeline, width=width).split("\n")
    assert len(lines) == plan.devices
    assert max(map(len, lines)) <= width
    assert len(set(map(len, lines))) == 1
    assert max(map(len, draw_rich(timeline, width=width).plain.split("\n")[: plan.devices])) <= width


@pytest.mark.parametrize("name", ["gpipe", "zb_v"])
def test_colour_and_plain_show_the_same_blocks(name: str) -> None:
    timeline = stretto.simulate(getattr(stretto.schedules, name)(devices=2, microbatches=3))
    coloured = draw_rich(timeline, width=100)
    assert "backward for weights" in coloured.plain
    assert {style for _, _, style in coloured.spans} > {"bold", "black on #f5a742"}


def test_nothing_to_draw_is_drawn() -> None:
    timeline = stretto.simulate(gpipe(devices=1, microbatches=1), stretto.Costs(F=0, I=0, W=0))
    assert draw_text(timeline) == "0 "


def test_a_weight_update_is_drawn_by_its_lanes() -> None:
    costs = stretto.Costs(bucket=BucketTimes(h2d=2, broadcast=1, reload=1))
    timeline = stretto.simulate(stretto.weight_update(devices=2, buckets=4), costs)
    assert draw_text(timeline, width=90).split("\n") == [
        "0 H2D       H0──────········H2──────············",
        "0 Broadcast ········S0──D1──········S2──D3──····",
        "0 Reload    ············R0──R1──········R2──R3──",
        "1 H2D       H1──────········H3──────············",
        "1 Broadcast ········D0──S1──········D2──S3──····",
        "1 Reload    ············R0──R1──········R2──R3──",
    ]
    assert "broadcast (source)" in draw_rich(timeline, width=90).plain

"""A schedule is added by one registration."""

import pytest

import stretto
from stretto.schedules import SCHEDULES, register
from stretto.schedules.registry import schedule_named

ABOUT = {"meaning": "backwards from the last", "limits": "any", "bubble": "0", "memory": "1"}


def test_a_registered_schedule_is_found_in_its_place() -> None:
    def mine(*, devices: int, microbatches: int) -> stretto.Plan:
        return stretto.schedules.gpipe(devices=devices, microbatches=microbatches)

    try:
        assert register(published="2019-01", aliases=("my",), **ABOUT)(mine) is mine
        assert list(SCHEDULES)[:3] == ["gpipe", "mine", "one_f_one_b"]
        assert schedule_named("My").make is mine
        with pytest.raises(stretto.PlanError, match="there already is a schedule mine"):
            register(published="2019-01", **ABOUT)(mine)
    finally:
        del SCHEDULES["mine"]


def test_names_are_forgiving_and_near_misses_are_guessed() -> None:
    assert schedule_named("1F1B").name == "one_f_one_b"
    assert schedule_named("ZB-V").name == "zb_v"
    with pytest.raises(stretto.PlanError, match="unknown schedule 'dualpip'; did you mean dualpipe"):
        schedule_named("dualpip")


def test_each_registered_function_has_the_name_that_it_is_registered_by() -> None:
    for name, schedule in SCHEDULES.items():
        assert getattr(stretto.schedules, name) is schedule.make


def test_names_that_are_taken_or_cannot_be_typed_are_refused() -> None:
    def mine(*, devices: int, microbatches: int) -> stretto.Plan:
        return stretto.schedules.gpipe(devices=devices, microbatches=microbatches)

    with pytest.raises(stretto.PlanError, match="there already is a schedule 1f1b"):
        register(published="2019-01", aliases=("1f1b",), **ABOUT)(mine)
    for name in ("Mine", "<lambda>", "a/b"):
        mine.__name__ = name
        with pytest.raises(stretto.PlanError, match="a name in lower case"):
            register(published="2019-01", **ABOUT)(mine)
    assert "mine" not in SCHEDULES


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"aliases": "my"}, "aliases are a tuple of names"),
        ({"aliases": ("My-Alias",)}, "aliases are a tuple of names"),
        ({"stages_per_device": "2"}, "stages_per_device is a whole number of at least 1"),
        ({"aliases": ("weight_update",)}, "is what the command line calls the weight update"),
        ({"rounds": -1}, "rounds is a whole number of at least 0"),
        ({"published": 2019}, "published is a text about the schedule"),
        ({"variable": True}, "called with the keywords devices, microbatches, stages_per_device, overlap: "),
    ],
)
def test_odd_registrations_are_refused(about: dict[str, object], says: str) -> None:
    def mine(*, devices: int, microbatches: int) -> stretto.Plan:
        return stretto.schedules.gpipe(devices=devices, microbatches=microbatches)

    with pytest.raises(stretto.PlanError, match=says):
        register(**{"published": "2019-01", **ABOUT, **about})(mine)
    assert "mine" not in SCHEDULES

"""When memory that several streams share may be released."""

from hypothesis import given
from hypothesis import strategies as st

from stretto.execute.release import kept_until
from stretto.program.task import Kind, Lane, Task

LANES = ("compute", "comm", "host", "d2h")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Task], list[list[int]]]:
    """Tasks of one device in the order of their issue, each with needs of earlier tasks in other lanes."""
    lanes = draw(st.lists(st.sampled_from(LANES), min_size=1, max_size=14))
    tasks = [Task(Lane(0, name), Kind.F, stage=0, microbatch=at) for at, name in enumerate(lanes)]
    needs = []
    for at, name in enumerate(lanes):
        earlier = [place for place in range(at) if lanes[place] != name]
        needs.append(draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True)) if earlier else [])
    return tasks, needs


def waits_for(tasks: list[Task], needs: list[list[int]], at: int) -> set[int]:
    """All tasks that a task comes after, by needs and by the order of its lane."""
    found, open_ = set(), [at]
    while open_:
        one = open_.pop()
        same = [place for place in range(one) if tasks[place].lane == tasks[one].lane]
        for place in [*needs[one], *same]:
            if place not in found and tasks[place].lane.name != "d2h":
                found.add(place)
                open_.append(place)
    return found


def safe(tasks: list[Task], needs: list[list[int]], at: int, issued: int) -> bool:
    """Whether the next task of every other lane that has memory of its own comes after this one."""
    for name in LANES[:3]:
        later = [place for place in range(issued, len(tasks)) if tasks[place].lane.name == name]
        if later and tasks[at].lane.name != name and at not in waits_for(tasks, needs, later[0]):
            return False
    return True


@given(programs())
def test_memory_is_released_as_soon_as_it_is_safe(program: tuple[list[Task], list[list[int]]]) -> None:
    tasks, needs = program
    for at, until in enumerate(kept_until(tasks, needs)):
        assert at < until <= len(tasks)
        assert all(safe(tasks, needs, at, issued) for issued in range(until, len(tasks) + 1))
        if tasks[at].lane.name != "d2h":
            assert until == at + 1 or not safe(tasks, needs, at, until - 1)


def test_a_lane_that_does_not_wait_keeps_memory_until_its_last_task() -> None:
    compute, comm = Lane(0, "compute"), Lane(0, "comm")
    tasks = [Task(lane, Kind.F, stage=0, microbatch=at) for at, lane in enumerate([compute, comm, compute, comm])]
    assert kept_until(tasks, [[], [], [], []]) == [4, 3, 4, 4]
    assert kept_until(tasks, [[], [], [1], [2]]) == [2, 2, 3, 4]

"""When memory that several streams share may be released."""

from hypothesis import given
from hypothesis import strategies as st

from stretto.execute.release import kept_until
from stretto.program.task import Kind, Lane, Task

LANES = ("compute", "comm", "host", "h2d")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Task], list[list[int]]]:
    """Tasks of one device in the order of their issue, each with needs of earlier tasks in other lanes."""
    lanes = draw(st.lists(st.sampled_from(LANES), min_size=1, max_size=14))
    kinds = [Kind.ONLOAD if name == "h2d" else Kind.F for name in lanes]
    tasks = [
        Task(Lane(0, name), kind, stage=0, microbatch=at)
        for at, (name, kind) in enumerate(zip(lanes, kinds, strict=True))
    ]
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
            if place not in found and tasks[place].lane.name != "h2d":
                found.add(place)
                open_.append(place)
    return found


def safe(tasks: list[Task], needs: list[list[int]], at: int, issued: int) -> bool:
    """Whether the next task that makes memory of any other lane comes after this one. What comes back from the host
    comes to memory of the compute lane, after what that was given before.
    """
    for name in LANES[:3]:
        makes = (name, "h2d") if name == "compute" else (name,)
        later = next((place for place in range(issued, len(tasks)) if tasks[place].lane.name in makes), None)
        if later is None or tasks[at].lane.name == name:
            continue
        if tasks[later].kind is Kind.ONLOAD:
            before = [place for place in range(later) if tasks[place].lane.name == "compute"]
            after = waits_for(tasks, needs, before[-1]) if before else set()
        else:
            after = waits_for(tasks, needs, later)
        if at not in after:
            return False
    return True


@given(programs())
def test_memory_is_released_as_soon_as_it_is_safe(program: tuple[list[Task], list[list[int]]]) -> None:
    tasks, needs = program
    for at, until in enumerate(kept_until(tasks, needs)):
        assert at < until <= len(tasks)
        assert all(safe(tasks, needs, at, issued) for issued in range(until, len(tasks) + 1))
        if tasks[at].lane.name != "h2d":
            assert until == at + 1 or not safe(tasks, needs, at, until - 1)


def test_a_lane_that_does_not_wait_keeps_memory_until_its_last_task() -> None:
    compute, comm = Lane(0, "compute"), Lane(0, "comm")
    tasks = [Task(lane, Kind.F, stage=0, microbatch=at) for at, lane in enumerate([compute, comm, compute, comm])]
    assert kept_until(tasks, [[], [], [], []]) == [4, 3, 4, 4]
    assert kept_until(tasks, [[], [], [1], [2]]) == [2, 2, 3, 4]


def test_memory_that_comm_still_reads_is_not_given_to_what_comes_back() -> None:
    compute, comm, h2d = Lane(0, "compute"), Lane(0, "comm"), Lane(0, "h2d")
    tasks = [
        Task(compute, Kind.F, stage=0, microbatch=0),
        Task(comm, Kind.F, stage=0, microbatch=0, part=1),  # reads what the first has made
        Task(h2d, Kind.ONLOAD, stage=0, microbatch=1),
        Task(compute, Kind.F, stage=0, microbatch=0, part=2),  # waits for comm
    ]
    assert kept_until(tasks, [[], [0], [], [1]])[1] == 3
    assert kept_until(tasks[:2] + tasks[3:], [[], [0], [1]])[1] == 2

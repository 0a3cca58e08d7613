"""Schedules against PyTorch's own, over many sizes, and where we differ on purpose."""

import csv
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

import stretto
from stretto.schedules import dualpipev, gpipe, interleaved, one_f_one_b, zb_v


def peer_order(kind: str, *, devices: int, stages_per_device: int, microbatches: int) -> dict[int, list[Any]]:
    """The compute order PyTorch's schedule class builds; its constructor would want real stages."""
    schedule = object.__new__(getattr(torch_schedules, kind))
    schedule.__dict__.update(
        pp_group_size=devices,
        n_local_stages=stages_per_device,
        num_stages=devices * stages_per_device,
        _num_stages=devices * stages_per_device,
        _n_microbatches=microbatches,
        number_of_rounds=(rounds := max(1, microbatches // devices)),
        microbatches_per_round=microbatches // rounds,
    )
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(devices)}


def as_csv(order: dict[int, list[Any]]) -> str:
    """As PyTorch's `_dump_csv` writes it."""
    file = io.StringIO()
    writer = csv.writer(file)
    for rank in order:
        writer.writerow(order[rank])
    return file.getvalue()


SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in range(1, 21)]


@pytest.mark.parametrize("stages_per_device", [1, 2, 3])
def test_interleaved(stages_per_device: int) -> None:
    compared = 0
    for devices, microbatches in SIZES:
        ours = interleaved(devices=devices, stages_per_device=stages_per_device, microbatches=microbatches)
        if microbatches % max(1, microbatches // devices):
            continue  # PyTorch refuses these; ours are proved by check() elsewhere
        theirs = peer_order(
            "ScheduleInterleaved1F1B", devices=devices, stages_per_device=stages_per_device, microbatches=microbatches
        )
        assert stretto.parse_plan(as_csv(theirs)) == ours
        compared += 1
    assert compared > 60


def test_zb_v() -> None:
    for devices, microbatches in SIZES:
        theirs = peer_order("ScheduleZBVZeroBubble", devices=devices, stages_per_device=2, microbatches=microbatches)
        assert stretto.parse_plan(as_csv(theirs)) == zb_v(devices=devices, microbatches=microbatches)


def test_dualpipev() -> None:
    for devices, microbatches in SIZES:
        if microbatches < 2 * devices:
            continue
        theirs = peer_order("ScheduleDualPipeV", devices=devices, stages_per_device=2, microbatches=microbatches)
        assert stretto.parse_plan(as_csv(theirs)) == dualpipev(devices=devices, microbatches=microbatches)


def single_order(kind: str, *, devices: int, microbatches: int) -> dict[int, list[Any]]:
    schedule = object.__new__(getattr(torch_schedules, kind))
    schedule.__dict__.update(_num_stages=devices, _n_microbatches=microbatches, _stage=SimpleNamespace())
    order: dict[int, list[Any]] = schedule._get_pipeline_order()
    return order


def test_gpipe() -> None:
    for devices, microbatches in SIZES:
        theirs = single_order("ScheduleGPipe", devices=devices, microbatches=microbatches)
        assert stretto.parse_plan(as_csv(theirs)) == gpipe(devices=devices, microbatches=microbatches)


def test_1f1b_on_all_but_the_last_device() -> None:
    for devices, microbatches in SIZES:
        if microbatches < devices:
            continue  # PyTorch then lists forwards of microbatches that do not exist
        theirs = as_csv(single_order("Schedule1F1B", devices=devices, microbatches=microbatches)).split()[:-1]
        ours = str(one_f_one_b(devices=devices, microbatches=microbatches)).split()[:-1]
        rows = [",".join(cell for cell in row.split(",") if cell and "REDUCE" not in cell) for row in theirs]
        assert rows == ours


def test_1f1b_differs_on_the_last_device_where_pytorchs_listing_is_off_by_one() -> None:
    """PyTorch's description of 1F1B (not what it runs) counts the last rank's forwards from 1."""
    last = as_csv(single_order("Schedule1F1B", devices=2, microbatches=2)).split()[-1]
    assert [cell for cell in last.split(",") if cell and "REDUCE" not in cell] == ["1F1", "1B0", "1F2", "1B1"]
    assert str(one_f_one_b(devices=2, microbatches=2)).split()[-1] == "1F0,1B0,1F1,1B1"


@pytest.mark.parametrize("name", ["interleaved", "zb_v", "dualpipev"])
def test_our_csv_loads_in_pytorch_and_lowers_to_a_sound_program(name: str) -> None:
    """PyTorch adds its own transfers to our plan; check() then proves its program sound."""
    plan = getattr(stretto.schedules, name)(devices=4, microbatches=8)
    placement = plan.placement
    actions = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row.split(",")]
        for rank, row in enumerate(str(plan).split("\n"))
    }
    assert as_csv(actions).replace("\r\n", "\n").strip() == str(plan)
    with_comms = torch_schedules._add_send_recv(actions, lambda stage: placement.device(stage, 0), plan.stages)
    theirs = stretto.parse_program(as_csv(with_comms))
    assert stretto.check(theirs) == []
    assert sorted(str(theirs).replace("\n", ",").split(",")) == sorted(
        str(stretto.lower(plan)).replace("\n", ",").split(",")
    )

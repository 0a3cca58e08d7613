"""Memory policies in a step: they change where tensors are kept, and not one bit of what is trained."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import memory_jobs
from devices import device_ranks
from memory_jobs import Found
from models import Case
from ranks import Ranks
from stretto import Memory

POLICIES = {
    "offload": Memory(sites={"*": "offload"}, min_bytes=0),
    "recompute": Memory(sites={"*": "recompute"}),
    "both": Memory(sites={"*norm": "recompute", "*": "offload"}, min_bytes=0),
    "inputs": Memory(sites={"*": "recompute+offload"}, min_bytes=0, copy_actions=2),
    "half": Memory(sites={"*": "offload"}, min_bytes=0, fraction=0.5, keep_layers=1),
    "exceptions": Memory(sites={"*.down": "keep", "*.up": "offload", "*": "recompute"}, min_bytes=0),
}
SCHEDULES = ["gpipe", "one_f_one_b", "interleaved", "zb_v", "dualpipe", "dualpipev"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = device_ranks(4)
    yield started
    started.stop()


def assert_same(found: list[Found], expected: list[Found]) -> None:
    for (losses, gradients), (plain_losses, plain_gradients) in zip(found, expected, strict=True):
        assert losses == plain_losses
        assert gradients.keys() == plain_gradients.keys()
        for name, gradient in gradients.items():
            assert np.array_equal(gradient, plain_gradients[name]), name


@pytest.mark.parametrize("phased", [False, True], ids=["whole", "phased"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_policy_changes_no_bit(ranks: Ranks, schedule: str, phased: bool) -> None:
    case = Case(schedule, 4, 8, layers=10, phased=phased, dropout=0.2 * (not phased), dtype=torch.float32)
    runs = [(case, policy) for policy in ("none", *POLICIES.values())]
    plain, *others = zip(*ranks.run(memory_jobs.each, 4, memory_jobs.trained, runs), strict=True)
    for policy, told in zip(POLICIES.values(), others, strict=True):
        assert_same([found for found, *_ in told], [found for found, *_ in plain])
        assert any(left > 0 and nbytes > 0 for _, left, nbytes in told) == policy.offloads


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved"])
def test_nothing_of_a_step_is_found_in_a_later_one(ranks: Ranks, schedule: str) -> None:
    policy = Memory(sites={"*norm": "recompute", "*": "offload"}, min_bytes=0)
    expected, found = (ranks.run(memory_jobs.many_steps, 4, schedule, it, 50) for it in ("none", policy))
    assert_same(found, expected)


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe"])
@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_so_it_is_with_experts_on_a_mesh(ranks: Ranks, sizes: dict[str, int], schedule: str) -> None:
    every: list[Any] = [
        {"*": "offload"},
        {"*": "recompute"},
        {"*layernorm": "recompute", "mlp.swiglu": "recompute", "attn": "offload"},
        {"mlp": "recompute+offload", "*": "offload"},
        {"model.layers.1.mlp": "recompute", "*": "offload"},
        {"*.mlp.experts": "keep", "*": "recompute"},
    ]
    policies = [Memory(sites=sites, min_bytes=0) for sites in every]
    runs = [(sizes, schedule, policy) for policy in ("none", *policies)]
    expected, *others = zip(*ranks.run(memory_jobs.each, 4, memory_jobs.with_experts, runs), strict=True)
    for policy, told in zip(policies, others, strict=True):
        assert_same([found for found, _ in told], [found for found, _ in expected])
        assert any(left for _, left in told) == policy.offloads


def test_so_it_is_where_new_memory_is_filled(ranks: Ranks) -> None:
    expected, told = (
        ranks.run(memory_jobs.filled, 4, policy) for policy in ("none", Memory(sites={"*": "offload"}, min_bytes=0))
    )
    assert_same([found for found, _ in told], [found for found, _ in expected])
    assert any(left for _, left in told)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_a_failure_while_something_comes_back_leaves_nothing_behind(ranks: Ranks, schedule: str) -> None:
    case = Case(schedule, 4, 8, phased=True, dtype=torch.float32)
    expected = [found for found, *_ in ranks.run(memory_jobs.trained, 4, case, "none")]
    told = ranks.run(memory_jobs.after_a_failure, 4, case, POLICIES["offload"])
    assert all("out of luck" in said for said, _ in told)
    assert_same([found for _, found in told], expected)


def test_no_token_travels_twice_because_a_phase_is_recomputed(ranks: Ranks) -> None:
    plain = ranks.run(memory_jobs.dispatches, 4, "none")
    assert all(plain)
    assert ranks.run(memory_jobs.dispatches, 4, {"*": "recompute"}) == plain


def test_copies_are_recorded_on_their_lanes(ranks: Ranks) -> None:
    copies, *_ = ranks.run(memory_jobs.recorded, 4, "interleaved")
    assert {(name.strip("0123456789"), lane) for name, lane in copies} == {("OFFLOAD", "d2h"), ("ONLOAD", "h2d")}


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "another rank": (
        [{"memory": {"*": "offload"}}, {"memory": "none"}],
        "rank 1 was given another memory.sites than rank 0: '*' is not there on rank 1 and offload on rank 0",
    ),
    "another pattern": (
        [{"memory": {**dict.fromkeys(["*.norm", "*.up", "*.down"], "keep"), "*": it}} for it in ("recompute", "keep")],
        "rank 1 was given another memory.sites than rank 0: '*' is keep on rank 1 and recompute on rank 0",
    ),
    "another order": (
        [{"memory": {"*.norm": "keep", **dict.fromkeys(it, "offload")}} for it in (["*.up", "*"], ["*", "*.up"])],
        "only their order differs, first where rank 1 has '*' and rank 0 '*.up'",
    ),
    "another fraction": (
        [{"memory": Memory(sites={"*": "offload"}, fraction=fraction)} for fraction in (0.5, 1)],
        "rank 1 was given another memory.fraction than rank 0 (1 and 0.5)",
    ),
    "an action": ([{"memory": {"*": "forget"}}], "what becomes of '*' is one of keep, recompute, fp8, offload"),
    "a preset": ([{"memory": "k3"}], 'memory is a stretto.Memory, a dict such as {"*.norm": "recompute"'),
    "twice": ([{"memory": {"*": "offload"}, "checkpoint": True}], "checkpoint is a short form of memory, so give one"),
    "shadowed": ([{"memory": {"*": "offload", "*.norm": "keep"}}], "'*' decides about all that '*.norm' matches"),
    "unknown": ([{"memory": {"attn.*": "offload"}}], "memory names 'attn.*', but no phase or module is called that"),
    "the loss": ([{"memory": {"loss": "offload"}}], "memory names 'loss', but the loss is no site: what it saves goes"),
    "no room": (
        [{"memory": Memory(sites={"*": "offload"}, min_bytes=0, host_bytes=1000)}],
        " for passes of stage 0); host_bytes allows 1 kB",
    ),
}


@pytest.mark.parametrize("dry", [False, True], ids=["step", "dry run"])
@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("attn.swiglu", "swiglu runs in the phase mlp, not in attn"),
        ("mlp.input_layernorm", ".input_layernorm runs in the phase attn, not in mlp"),
        ("dispatch.swiglu", "swiglu runs in the phase mlp, not in dispatch"),
    ],
)
def test_a_module_in_a_phase_that_does_not_run_it_is_refused(ranks: Ranks, pattern: str, says: str, dry: bool) -> None:
    for error, _ in ranks.run(memory_jobs.said_of_patterns, 4, {pattern: "recompute"}, dry):
        assert error.startswith(f"memory names {pattern!r}, but model.layers.")
        assert says in error


@pytest.mark.parametrize("dry", [False, True], ids=["step", "dry run"])
def test_a_pattern_for_modules_that_do_not_run_is_warned_of_once(ranks: Ranks, dry: bool) -> None:
    first, *others = ranks.run(memory_jobs.said_of_patterns, 4, {"*.idle": "recompute", "*layernorm": "recompute"}, dry)
    assert first == (
        "",
        [
            "memory names '*.idle', but nothing that it decides about has run: these modules are not called, or only "
            "for other data, without gradients, within a checkpoint of your own, or as part of compiled code"
        ],
    )
    assert others == [("", [])] * 3


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_offload_by_which_nothing_leaves_is_warned_of_once(ranks: Ranks, min_bytes: int) -> None:
    (said,) = ranks.run(memory_jobs.said_of_offload, 1, min_bytes)
    assert len(said) == bool(min_bytes), said
    assert not min_bytes or "nothing leaves the device: only tensors of at least min_bytes (1.05 MB)" in said[0][0]
    assert all(file == memory_jobs.__file__ for _, file in said), "the user's line"


@pytest.mark.parametrize("sites", [{"*": "offload"}, {"*.site": "recompute", "*": "offload"}], ids=["kept", "site"])
def test_odd_tensors_are_saved_as_they_are(ranks: Ranks, sites: dict[str, Any]) -> None:
    """Quantized ones, and those that are on no device."""
    exact, found = (
        ranks.run(memory_jobs.with_odd_tensors, 1, policy) for policy in ("none", Memory(sites=sites, min_bytes=0))
    )
    assert found == exact


def test_a_module_in_phases_that_is_not_called_decides_about_those_within(ranks: Ranks) -> None:
    for sites in (
        {"model.layers.1.mlp": "recompute"},
        {"model.layers.1.mlp": "keep", "*": "recompute"},
        {"model.layers.1.mlp": "recompute", "*": "offload"},
    ):
        for labels in ranks.run(memory_jobs.sites_of_a_step, 4, sites):
            assert {"attn.mlp", "mlp.mlp"} & labels, labels


@pytest.mark.parametrize("what", REFUSED)
def test_refused(ranks: Ranks, what: str) -> None:
    options, says = REFUSED[what]
    assert any(says in told for told in ranks.run(memory_jobs.refused, 2, options))

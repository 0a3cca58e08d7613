"""Memory policies: which pattern decides, what is refused, and their files."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto import Memory, PlanError, load_memory
from stretto.memory import ACTIONS, memory_of
from stretto.pipeline.options import memory_from


def test_the_first_pattern_that_matches_decides() -> None:
    policy = Memory(sites={"*.norm": "recompute", "attn.*": "offload", "*": "keep"})
    assert policy.action("3.norm") == "recompute"
    assert policy.action("5", "attn.norm") == "recompute"
    assert policy.action("3.linear", "attn.linear") == "offload"
    assert policy.action("3.linear") == "keep"
    assert Memory().action("3.linear") is None


def test_only_policies_with_something_to_offload_offload() -> None:
    assert Memory(sites={"*": "offload"}).offloads
    assert Memory(sites={"*": "recompute+offload"}).offloads
    assert not Memory(sites={"*": "recompute"}).offloads
    assert not Memory(sites={"*": "offload"}, fraction=0).offloads
    assert Memory(sites={"*": "offload"}, fraction=(0, 0.5)).offloads
    assert not Memory(sites={"*": "offload"}, fraction=(0, 0.0)).offloads
    assert not Memory(sites={"*": "keep"}, fraction="auto").offloads


def test_a_fraction_is_of_all_stages_or_of_each() -> None:
    assert [Memory(fraction=0.5).fraction_of(stage) for stage in (0, 3)] == [0.5, 0.5]
    listed = Memory(fraction=[0.25, 1])  # type: ignore[arg-type]
    assert [listed.fraction_of(stage) for stage in (0, 1)] == [0.25, 1]
    assert listed == Memory(fraction=(0.25, 1))


def test_what_a_pipeline_takes_for_a_policy() -> None:
    assert memory_of("none") == memory_of(None) == memory_of({}) == Memory()
    assert memory_of({"*": "offload"}) == Memory(sites={"*": "offload"})
    assert memory_of("auto") == Memory(sites={"*": "offload"}, fraction="auto")
    for wrong in ("k3", 3, ["*"], True):
        with pytest.raises(
            PlanError, match=r'memory is a stretto.Memory, a dict such as .* one of "none", "k2", "auto"; load_memory'
        ):
            memory_of(wrong)


def test_none_is_no_policy_beside_a_short_form() -> None:
    for nothing in (None, "none"):
        policy, wrong = memory_from(nothing, True, ())
        assert (policy.sites, wrong) == ({"*": "recompute"}, None)
    assert "checkpoint is a short form of memory" in str(memory_from({"*": "keep"}, True, ())[1])


sizes = st.integers(0, 1 << 60)
policies = st.builds(
    Memory,
    sites=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda it: it.isprintable()), st.sampled_from(ACTIONS)
    ),
    fraction=st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple) | st.just("auto"),
    min_bytes=sizes,
    max_in_flight=st.none() | sizes,
    keep_layers=st.integers(0, 9),
    host_bytes=st.none() | sizes,
    copy_actions=st.integers(1, 9),
)


@given(policies)
def test_files_hold_all_of_a_policy(tmp_path_factory: pytest.TempPathFactory, policy: Memory) -> None:
    path = tmp_path_factory.mktemp("policies") / "memory.toml"
    policy.save(path)
    loaded = load_memory(path)
    assert loaded == policy
    assert list(loaded.sites) == list(policy.sites)  # their order decides


def test_a_file_may_give_sizes_with_units(tmp_path: Path) -> None:
    path = tmp_path / "memory.toml"
    path.write_text('min_bytes = "64KiB"\nhost_bytes = "2GB"\n[sites]\n"*.norm" = "recompute"\n"attn" = "offload"\n')
    assert load_memory(path) == Memory(
        sites={"*.norm": "recompute", "attn": "offload"}, min_bytes=65536, host_bytes=2_000_000_000
    )


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "memory.toml"
    path.write_text('[sites]\n"*" = "keep"\n', encoding="utf-8-sig")
    assert load_memory(path) == Memory(sites={"*": "keep"})


def test_a_policy_stays_as_it_was_checked() -> None:
    sites: dict[str, Any] = {"*": "keep"}
    policy = Memory(sites=sites)
    sites["*.norm"] = "recomptue"
    assert policy.sites == {"*": "keep"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"sites": {"*": "offlaod"}},
            r"what becomes of '\*' is one of keep, recompute, fp8, offload, .* \(got 'offlaod'\)",
        ),
        ({"sites": {"": "keep"}}, r"a site is named by a pattern, such as '\*.norm' \(got ''\)"),
        ({"sites": {3: "keep"}}, r"a site is named by a pattern, such as '\*.norm' \(got 3\)"),
        ({"sites": ["*"]}, r"sites is a table of patterns, such as"),
        ({"sites": {"fraction": 0.5}}, r"fraction is a limit and no site: it goes beside sites, and in a file above"),
        ({"fraction": 1.5}, r"fraction is a number from 0 to 1, a list .* or \"auto\" \(got 1.5\)"),
        ({"fraction": True}, r"fraction is a number from 0 to 1, a list .* or \"auto\" \(got True\)"),
        ({"fraction": float("nan")}, r"fraction is a number from 0 to 1, a list .* or \"auto\" \(got nan\)"),
        ({"fraction": [0.5, 2]}, r"fraction is a number from 0 to 1, a list .* \(got 2\)"),
        ({"fraction": []}, r"fraction is an empty list; give one number, or one for each stage"),
        ({"fraction": "all"}, r"fraction is a number from 0 to 1, a list .* \(got 'all'\)"),
        ({"min_bytes": -1}, r"min_bytes is a whole number of bytes \(got -1\)"),
        ({"min_bytes": None}, r"min_bytes is a whole number of bytes \(got None\)"),
        ({"host_bytes": 1.5}, r"host_bytes is a whole number of bytes \(got 1.5\)"),
        ({"max_in_flight": "2GB"}, r"of bytes, such as 64 << 30 for 64 GiB; only files take units \(got '2GB'\)"),
        ({"preset": "auto"}, r'one of "none", "k2"; "auto" is a fraction: Memory\(..., fraction="auto"\) \(got'),
        ({"keep_layers": -1}, r"keep_layers is a whole number of layers \(got -1\)"),
        ({"copy_actions": 0}, r"copy_actions is a number of actions of at least 1 \(got 0\)"),
    ],
)
def test_wrong_policies_are_refused_in_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says) as error:
        Memory(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sites = ", "not valid TOML"),
        (
            '[site]\n"*" = "keep"\n',
            "'site' is nothing that a memory policy has; there are sites, preset, fraction, min_bytes",
        ),
        ('min_bytes = "2 apples"\n', r"min_bytes is a number of bytes, or a size such as 2GB \(got '2 apples'\)"),
        ("[sites]\n'*' = 'keep'\nmin_bytes = 0\n", r"min_bytes is a limit and no site: .* in a file above \[sites\]"),
        (
            "[sites]\nmodel.layers.3 = 'keep'\n",
            r'names with dots are quoted in a file: "model.layers.3" \(got a table \'model\'\)',
        ),
        ('host_bytes = "1.5"\n', r"host_bytes is a whole number of bytes \(got '1.5'\)"),
        ("fraction = 2\n", "fraction is a number from 0 to 1"),
    ],
)
def test_wrong_files_are_refused_with_their_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "memory.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=f"memory.toml: {says}"):
        load_memory(path)


def test_policies_are_saved_as_toml(tmp_path: Path) -> None:
    with pytest.raises(stretto.TextError, match=r"a memory policy is saved as \.toml"):
        Memory().save(tmp_path / "memory.json")

"""learner.remat and critic.remat name a policy and the layers that it holds for."""

import dataclasses

import pytest

from jaxrl.config.checks.memory import memory_errors, offload_keys
from jaxrl.config.keys import RunConfig
from jaxrl.config.remat import LayerRange, parse_remat, read_remat


def run(remat: str, *, critic: str = "", layers: str = "auto") -> RunConfig:
    default = RunConfig()
    return dataclasses.replace(
        default,
        learner=dataclasses.replace(default.learner, remat=remat),
        critic=dataclasses.replace(default.critic, remat=critic),
        model=dataclasses.replace(default.model, layers=layers),
    )


def test_a_spec_names_the_policy_of_every_layer():
    assert list(parse_remat("dots").ranges(3)) == [LayerRange(0, 3, "dots", 1)]
    assert list(parse_remat("full?first=2").ranges(5)) == [
        LayerRange(0, 2, "full", 1),
        LayerRange(2, 5, "none", 1),
    ]
    assert list(parse_remat("full?first=8").ranges(5)) == [LayerRange(0, 5, "full", 1)]
    assert list(parse_remat("offload?group=4").ranges(10)) == [
        LayerRange(0, 8, "offload", 4),
        LayerRange(8, 10, "offload", 2),
    ]
    assert list(parse_remat("full?first=3&group=2").ranges(4)) == [
        LayerRange(0, 2, "full", 2),
        LayerRange(2, 3, "full", 1),
        LayerRange(3, 4, "none", 1),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ful", "'ful' is not known; did you mean 'full'? set one of full, offload, attention"),
        ("full?frist=2", "unknown option 'frist'; did you mean 'first'? the options of full are"),
        ("full?first=-1", "first=-1 is out of range"),
        ("full?group=0", "group=0 is out of range"),
        ("full?group=two", "group='two' is of type str"),
        ("none?first=2", "none recomputes no layer"),
    ],
)
def test_a_wrong_spec_is_one_clear_line(spec, message):
    [line] = read_remat(spec)[1]
    assert message in line
    with pytest.raises(ValueError, match=r"full|none"):
        parse_remat(spec)
    [line] = memory_errors(run("full", critic=spec))
    assert line.startswith("critic.remat=") and message in line


def test_offloaded_layer_inputs_need_stacked_layers():
    [line] = memory_errors(run("offload", layers="list"))
    assert "learner.remat='offload' needs stacked layers" in line
    assert not memory_errors(run("offload"))


def test_the_keys_that_need_host_memory_are_listed():
    assert offload_keys(run("full")) == ""
    both = run("full?first=2", critic="offload?group=2")
    learner = dataclasses.replace(both.learner, offload=("optimizer",))
    found = offload_keys(dataclasses.replace(both, learner=learner))
    assert "config.learner.offload=('optimizer',)" in found
    assert "config.critic.remat='offload?group=2'" in found


def test_the_critic_has_the_policys_remat_or_its_own():
    assert run("dots").critic_run.learner.remat == "dots"
    assert run("dots", critic="full").critic_run.learner.remat == "full"

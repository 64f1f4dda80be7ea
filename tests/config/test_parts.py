"""algorithm.parts names tokens and options; parts that cannot mean anything are refused."""

import pytest

from jaxrl.config.parts import Part, PartSettings, parse_parts, part_of, read_part
from jaxrl.config.resolve import default_config, resolve


def config(*parts, env="calculator", **keys):
    c = default_config()
    c.model.path, c.data.train = "model", ("task:addition",)
    c.algorithm.parts, c.env.name = parts, env
    if env:
        c.reward.functions = ("environment",)
    for name, value in keys.items():
        section, _, key = name.partition("__")
        c[section][key] = value
    return c


def test_a_part_is_its_tokens_and_options():
    observations, one_source = parse_parts(
        ("observations?weight=0.1", "observations?source=math&aggregation=seq_mean_token_mean")
    )
    assert observations == Part("observations", PartSettings(weight=0.1))
    assert (observations.name, one_source.name) == ("observations", "observations/math")
    both = observations, one_source
    assert part_of(both, "observations", "math") == 1
    assert part_of(both, "observations", "other") == 0  # the entry without a source
    assert part_of((one_source,), "observations", "other") is None
    assert part_of(both, "demonstrations", "math") is None


def test_a_weight_moves_linearly_to_its_final_value():
    (part,) = parse_parts(("observations?weight=0.5&final_weight=0.1&ramp=4",))
    assert [part.weight(step) for step in (0, 1, 4, 9)] == pytest.approx([0.5, 0.4, 0.1, 0.1])
    assert parse_parts(("observations?weight=0.5",))[0].weight(7) == 0.5


@pytest.mark.parametrize(
    ("spec", "message"),
    {
        "observation": "did you mean 'observations'?",
        "observations?wieght=1": "did you mean 'weight'?",
        "observations?weight=-1": "out of range; set a value >= 0",
        "observations?aggregation=token_sum": "is not known",
        "observations?weight=0": "has no weight in any step",
        "observations?final_weight=0.5": "no effect without ramp",
    }.items(),
)
def test_an_invalid_part_is_refused_with_the_remedy(spec, message):
    (line,) = read_part(spec)[1]
    assert message in line
    with pytest.raises(ValueError, match=r"algorithm\.parts="):
        resolve(config(spec))


SFT = dict(data__demonstrations=("sft.jsonl",), data__demonstrations_per_step=4)


MIXES = {
    "no rows": ({}, "set both, or leave 'demonstrations' out"),
    "no number": (dict(SFT, data__demonstrations_per_step=0), "set both, or leave"),
    "not divisible": (dict(SFT, data__prompts_per_step=6, learner__mini_batch_prompts=2), "the 3"),
    "rendered": (dict(SFT, data__rendered_prompts=True), "set data.rendered_prompts=False"),
}


@pytest.mark.parametrize("case", MIXES)
def test_demonstrations_that_cannot_be_trained_are_refused(case):
    keys, message = MIXES[case]
    with pytest.raises(ValueError, match=message):
        resolve(config("demonstrations?weight=0.5", env="", **keys))


@pytest.mark.parametrize("parts", [(), ("observations",)])
def test_demonstrations_without_a_part_are_refused(parts):
    with pytest.raises(ValueError, match="are trained by no part of the objective"):
        resolve(config(*parts, **SFT))


REFUSED = {
    "no environment": (dict(env=""), "no row has them"),
    "denominator of the update": (
        dict(algorithm__rejection="seq_mean_k1"),
        "set algorithm.rejection_scope='policy_loss'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_combinations_without_meaning_are_refused(case):
    keys, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        resolve(config("observations?weight=0.1", **keys))


def test_the_same_tokens_twice_and_another_temperature_are_refused():
    c = config("observations?weight=0.1", "observations?weight=0.2")
    c.rollout.sampling.temperature = 0.7
    with pytest.raises(ValueError, match="observations more than once") as error:
        resolve(c)
    assert "set rollout.sampling.temperature=1.0" in str(error.value)


def test_valid_parts_are_accepted():
    resolve(config("demonstrations?weight=0.5", env="", **SFT))
    assert resolve(config("observations?weight=0.1")).algorithm.parts == (
        "observations?weight=0.1",
    )

"""algorithm.parts names tokens and options; parts that cannot mean anything are refused."""

import pytest

from jaxrl.config.keys import AlgorithmConfig
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
    both = AlgorithmConfig(parts=("observations", "observations?source=math"))
    assert part_of(both, "observations", "math") == 1
    assert part_of(both, "observations", "other") == 0  # the entry without a source
    one = AlgorithmConfig(parts=("observations?source=math",))
    assert part_of(one, "observations", "other") is None
    assert part_of(both, "demonstrations", "math") is None
    roles = AlgorithmConfig(parts=("observations?role=tool", "observations?source=math&role=tool"))
    assert part_of(roles, "observations", "math", "tool") == 1
    assert part_of(roles, "observations", "other", "tool") == 0
    assert part_of(roles, "observations", "math", "user") is None
    names = [part.name for part in parse_parts(roles.parts)]
    assert names == ["observations/role_tool", "observations/math/role_tool"]


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


TERMS = ("policy", "kl?weight=0.1", "entropy?weight=0.01")
MATH = ("math?parts=policy",)
TERM_ERRORS = {
    "two weights of the KL": (TERMS, dict(kl_coef=0.1), "set algorithm.kl_coef=0.0"),
    "two weights of the entropy": (
        TERMS,
        dict(entropy_coef=0.1),
        "set algorithm.entropy_coef=0.0",
    ),
    "a target of the KL": (TERMS, dict(kl_target=0.1), "set algorithm.kl_target=0.0"),
    "a target of the entropy": (
        TERMS,
        dict(entropy_target=0.3),
        "set algorithm.entropy_target=0.0",
    ),
    "a role of sampled tokens": (("policy?role=tool",), {}, "leave out role=tool"),
    "an unknown role": (("observations?role=assistant",), {}, "tool | user | system"),
    "a KL in the reward": (TERMS, dict(kl_in="reward"), "set algorithm.kl_in='loss'"),
    "two references": (("kl", "distillation"), {}, "one reference"),
    "no distributions": (("distillation",), {}, "an estimate from sampled tokens"),
    "distributions": (("kl",), dict(kl="full"), "a divergence of distributions"),
    "no denominator": (TERMS, dict(aggregation="token_sum"), "set the option aggregation"),
    "unknown part": (
        ("policy", "observations"),
        dict(source_parts=("math?parts=policy,sft",)),
        "names sft for 'math'",
    ),
    "a list twice": (("policy",), dict(source_parts=MATH * 2), "math more than once"),
    "an empty list": (("policy",), dict(source_parts=("math",)), r"'SOURCE\?parts="),
    "no policy part": (
        ("entropy",),
        dict(source_parts=("math?parts=entropy",)),
        "set a part 'policy'",
    ),
    "a key for all": (
        ("policy",),
        dict(source_parts=MATH, entropy_coef=0.1),
        "set algorithm.entropy_coef=0.0",
    ),
    "routers of a source": (("router?source=math",), {}, "leave out source"),
}


@pytest.mark.parametrize("case", TERM_ERRORS)
def test_terms_that_contradict_other_keys_are_refused(case):
    parts, keys, message = TERM_ERRORS[case]
    keys = {f"algorithm__{name}": value for name, value in keys.items()}
    with pytest.raises(ValueError, match=message):
        resolve(config(*parts, **keys))


def test_two_weights_of_the_routers_are_refused():
    with pytest.raises(ValueError, match=r"set learner\.router_aux_coef=0\.0"):
        resolve(config("router?weight=0.1", learner__router_aux_coef=0.1))


def test_terms_are_parts_and_lists_of_sources_choose_among_them():
    c = config(*TERMS, "observations?weight=0.1", algorithm__source_parts=("math?parts=policy,kl",))
    c.rollout.sampling.temperature = 1.0
    algorithm = resolve(c).algorithm
    assert algorithm.has_kl and algorithm.has_entropy
    assert part_of(algorithm, "kl", "math") == 1 and part_of(algorithm, "kl", "code") == 1
    assert part_of(algorithm, "entropy", "math") is None
    assert part_of(algorithm, "entropy", "code") == 2
    assert resolve(config("policy?weight=0", "entropy")).algorithm.has_entropy


def test_terms_of_the_responses_alone_allow_any_temperature():
    c = config(*TERMS)
    c.rollout.sampling.temperature = 0.7
    resolve(c)


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

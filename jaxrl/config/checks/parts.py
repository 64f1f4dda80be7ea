"""Rules between the parts of the objective and the other keys."""

from jaxrl.config.choices import FULL_KLS, MAX_PARTS, PART_AGGREGATIONS
from jaxrl.config.keys import RunConfig
from jaxrl.config.parts import WEIGHT_KEYS, Part, names_given, read_part, read_source_parts
from jaxrl.config.schema import flatten, to_dict


def part_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    if not run.algorithm.parts:
        return [*_unused_demonstrations(run), *_source_errors(run)]
    read = [read_part(spec) for spec in run.algorithm.parts]
    if errors := [f"algorithm.parts={line}" for _, lines in read for line in lines]:
        return errors
    parts = [part for part, _ in read]
    if not any(part.kind == "demonstrations" for part in parts):
        errors = _unused_demonstrations(run)
    else:
        errors = _demonstration_errors(run)
    return [
        *errors,
        *_token_errors(parts, run),
        *_denominator_errors(parts, run),
        *_key_errors(run),
        *_source_errors(run),
    ]


def _unused_demonstrations(run: RunConfig) -> list[str]:
    data = run.data
    if not (data.demonstrations or data.demonstrations_per_step):
        return []
    return [
        f"data.demonstrations={data.demonstrations} with data.demonstrations_per_step="
        f"{data.demonstrations_per_step} are trained by no part of the objective; set "
        "algorithm.parts='demonstrations?weight=0.5', or remove both keys"
    ]


def _demonstration_errors(run: RunConfig) -> list[str]:
    """Demonstrations need rows, and as many in every update of a step."""
    data, errors = run.data, []
    if not (data.demonstrations and data.demonstrations_per_step):
        errors.append(
            f"algorithm.parts={run.algorithm.parts} trains on demonstrations, but "
            f"data.demonstrations={data.demonstrations} and data.demonstrations_per_step="
            f"{data.demonstrations_per_step}; set both, or leave 'demonstrations' out"
        )
    if data.demonstrations_per_step % run.mini_batches_per_step:
        errors.append(
            f"data.demonstrations_per_step={data.demonstrations_per_step} cannot be divided over "
            f"the {run.mini_batches_per_step} mini-batches of a step (data.prompts_per_step="
            f"{data.prompts_per_step}, learner.mini_batch_prompts={run.mini_batch_prompts}); set a "
            "multiple"
        )
    if data.rendered_prompts:
        errors.append(
            "data.rendered_prompts=True reads prompts without the chat template, which "
            "demonstrations are rendered by; set data.rendered_prompts=False"
        )
    return errors


def _token_errors(parts: list[Part], run: RunConfig) -> list[str]:
    """Parts whose tokens no row has, or that name the same tokens twice."""
    errors, names = [], [part.name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        errors.append(
            f"algorithm.parts={run.algorithm.parts} has {', '.join(twice)} more than once; give "
            "these tokens one entry, with the sum of the weights"
        )
    if len(parts) > MAX_PARTS:
        errors.append(f"algorithm.parts has {len(parts)} entries; leave at most {MAX_PARTS}")
    if "observations" in run.algorithm.part_kinds and not run.env.episodes:
        errors.append(
            f"algorithm.parts={run.algorithm.parts} trains on the tokens of an environment, but "
            f"{', '.join(run.env.kinds)} are empty: no row has them; set one of them, or leave "
            "'observations' out"
        )
    return errors


def _denominator_errors(parts: list[Part], run: RunConfig) -> list[str]:
    """The factors of the parts need all denominators before the update."""
    errors, algorithm = [], run.algorithm
    inherits = any(part.of_responses and not part.options.aggregation for part in parts)
    if inherits and algorithm.aggregation not in PART_AGGREGATIONS:
        errors.append(
            f"algorithm.aggregation={algorithm.aggregation!r} gives algorithm.parts="
            f"{algorithm.parts} no denominator; set the option aggregation of each of its entries"
        )
    if algorithm.removes_rejected:
        errors.append(
            f"algorithm.rejection={algorithm.rejection!r} with algorithm.rejection_scope='all' "
            "takes tokens out of the denominator during the update, but the weights of "
            "algorithm.parts need it before; set algorithm.rejection_scope='policy_loss'"
        )
    if names_given(algorithm) and (temperature := run.rollout.sampling.temperature) != 1.0:
        errors.append(
            f"rollout.sampling.temperature={temperature} divides all logits of the update, those "
            "of algorithm.parts too, whose cross-entropy is that of the model itself; set "
            "rollout.sampling.temperature=1.0, or algorithm.parts=()"
        )
    return errors


def _key_errors(run: RunConfig) -> list[str]:
    """A term has its weight from its part, or from its key."""
    algorithm, kinds = run.algorithm, run.algorithm.part_kinds
    values = flatten(to_dict(run))
    errors = [
        f"{name}={values[name]} and a part {kind!r} in algorithm.parts={algorithm.parts} both "
        f"weight one term; set {name}=0.0, or leave the part out"
        for kind, names in WEIGHT_KEYS.items()
        for name in names
        if kind in kinds and values[name]
    ]
    named = sorted(kinds & {"kl", "distillation"})
    if named and algorithm.kl_in != "loss":
        errors.append(
            f"algorithm.kl_in={algorithm.kl_in!r} has the KL in the reward, and algorithm.parts="
            f"{algorithm.parts} in the loss; set algorithm.kl_in='loss', or algorithm.kl_coef "
            f"without a part {named[0]!r}"
        )
    if len(named) > 1:
        errors.append(
            f"algorithm.parts={algorithm.parts} has 'kl' and 'distillation', and a run has one "
            "reference with one algorithm.kl; leave one of them out"
        )
    elif named and (algorithm.kl_estimator in FULL_KLS) != (named == ["distillation"]):
        errors.append(
            f"algorithm.parts={algorithm.parts} with algorithm.kl={algorithm.kl!r}: 'kl' is an "
            "estimate from sampled tokens ('k3'), 'distillation' a divergence of distributions "
            "('full', 'jsd'); set the other name, or another algorithm.kl"
        )
    return errors


def _source_errors(run: RunConfig) -> list[str]:
    """The parts of a source are entries of algorithm.parts, which then have all terms."""
    algorithm, specs = run.algorithm, run.algorithm.source_parts
    read = [read_source_parts(spec) for spec in specs]
    if errors := [f"algorithm.source_parts={line}" for *_, lines in read for line in lines]:
        return errors
    sources = [source for source, *_ in read]
    if twice := sorted({source for source in sources if sources.count(source) > 1}):
        errors.append(
            f"algorithm.source_parts={specs} has {', '.join(twice)} more than once; give a "
            "data_source one list"
        )
    kinds = algorithm.part_kinds - {"router"}
    for source, named, _ in read:
        if unknown := [kind for kind in named if kind not in kinds]:
            errors.append(
                f"algorithm.source_parts names {', '.join(unknown)} for {source!r}, which "
                f"algorithm.parts={algorithm.parts} does not have; set some of "
                f"{', '.join(sorted(kinds)) or 'its entries, such as policy'}"
            )
    terms = {
        "a part 'policy'": "policy" not in kinds,
        "algorithm.kl_coef=0.0": algorithm.kl_coef != 0 and algorithm.kl_in == "loss",
        "algorithm.entropy_coef=0.0": algorithm.entropy_coef != 0 or algorithm.entropy_target != 0,
    }
    if specs and (missing := [text for text, broken in terms.items() if broken]):
        errors.append(
            f"algorithm.source_parts={specs} selects entries of algorithm.parts={algorithm.parts}, "
            "but the terms of other keys are those of all sources; set "
            f"{' and '.join(missing)}, with the terms as entries"
        )
    return errors

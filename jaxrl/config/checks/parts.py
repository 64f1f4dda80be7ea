"""Rules between the further parts of the objective and the other keys."""

from jaxrl.config.keys import RunConfig
from jaxrl.config.parts import Part, read_part


def part_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    if not run.algorithm.parts:
        return _unused_demonstrations(run)
    read = [read_part(spec) for spec in run.algorithm.parts]
    if errors := [f"algorithm.parts={line}" for _, lines in read for line in lines]:
        return errors
    parts = [part for part, _ in read]
    if not any(part.tokens == "demonstrations" for part in parts):
        errors = _unused_demonstrations(run)
    else:
        errors = _demonstration_errors(run)
    return [*errors, *_token_errors(parts, run), *_denominator_errors(run)]


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
    tokens = {part.tokens for part in parts}
    if "observations" in tokens and not run.env.episodes:
        errors.append(
            f"algorithm.parts={run.algorithm.parts} trains on the tokens of an environment, but "
            f"{', '.join(run.env.kinds)} are empty: no row has them; set one of them, or leave "
            "'observations' out"
        )
    return errors


def _denominator_errors(run: RunConfig) -> list[str]:
    """The factors of the parts need the policy's denominator before the update."""
    errors, algorithm = [], run.algorithm
    if algorithm.removes_rejected:
        errors.append(
            f"algorithm.rejection={algorithm.rejection!r} with algorithm.rejection_scope='all' "
            "takes tokens out of the denominator during the update, but the weights of "
            "algorithm.parts need it before; set algorithm.rejection_scope='policy_loss'"
        )
    if (temperature := run.rollout.sampling.temperature) != 1.0:
        errors.append(
            f"rollout.sampling.temperature={temperature} divides all logits of the update, those "
            "of algorithm.parts too, whose cross-entropy is that of the model itself; set "
            "rollout.sampling.temperature=1.0, or algorithm.parts=()"
        )
    return errors

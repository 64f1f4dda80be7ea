"""Rules of token budgets of roles."""

from jaxrl.config.keys import RunConfig


def memory_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    return _budget_errors(run)


def _budget_errors(run: RunConfig) -> list[str]:
    """Scoring joins whole micro-batches of the update."""
    unit, errors = run.learner.token_budget, []
    for name, budget in (("score", run.score.token_budget), ("ref", run.ref.token_budget)):
        if budget % unit:
            errors.append(
                f"{name}.token_budget={budget} is no multiple of learner.token_budget={unit}; set "
                f"{-(-budget // unit) * unit}, or 0 for the same"
            )
    return errors

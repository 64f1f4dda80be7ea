"""Rules between the keys of preference optimization."""

from jaxrl.config.keys import RunConfig


def preference_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    errors, preference = [], run.preference
    if preference.loss == "kto" and run.mini_batch_prompts == 1:
        errors.append(
            "preference.loss='kto' estimates the KL from answers combined with prompts of other "
            "pairs, but an update has one pair; set learner.mini_batch_prompts (or "
            "data.prompts_per_step) to 2 or more, or preference.loss='dpo'"
        )
    if preference.ipo_reduction != "sum" and preference.loss != "ipo":
        errors.append(
            f"preference.ipo_reduction={preference.ipo_reduction!r} has no effect with "
            f"preference.loss={preference.loss!r}; set preference.loss='ipo', or "
            "preference.ipo_reduction='sum'"
        )
    return errors

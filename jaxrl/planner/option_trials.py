"""Tries compiler options for the best candidate of a search: which make a step faster?"""

import dataclasses
from collections.abc import Callable

import jax

from jaxrl.learner.xla import options_to_try, with_option
from jaxrl.planner.plan import Plan
from jaxrl.planner.search import Candidate, plan_candidate, rank
from jaxrl.planner.sizes import Job

LEAST_GAIN = 0.001  # of a step's time, below which an option is not worth its line


@dataclasses.dataclass(frozen=True)
class OptionTrial:
    """A value of learner.xla, and the step of the best candidate with it."""

    option: str
    before_s: float  # with the options that were kept before it
    after_s: float = 0.0
    fits: bool = False
    kept: bool = False
    error: str = ""  # why there is no plan with it


def try_options(
    job: Job,
    found: list[tuple[Candidate, Plan | None]],
    *,
    on_start: Callable[[str], None] = lambda line: None,
    compile_plan: Callable[[Job, Candidate, Plan], Plan] = plan_candidate,
) -> tuple[list[tuple[Candidate, Plan | None]], list[OptionTrial]]:
    """(the result of a search with the first candidate's best options, what was tried).

    Each of `options_to_try` is tried once, together with those that were kept before it: at most
    six plans. It is kept if the plan fits and a step is faster in the order of the search. Nothing
    is tried if no candidate fits.
    """
    candidate, plan = found[0]
    if plan is None or not plan.fits:
        return found, []
    names, machine, trials = job.cfg.learner.xla, job.machine, []
    options = options_to_try(names, machine.platform, machine.devices[0].device_kind)
    for i, option in enumerate(options):
        on_start(f"compiling with learner.xla={option} ({i + 1} of {len(options)})")
        before_s = rank((candidate, plan))[1]
        tried = dataclasses.replace(candidate, xla=with_option(names, option))
        try:
            new = compile_plan(job, tried, plan)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            trials.append(OptionTrial(option, before_s, error=str(error).splitlines()[0]))
            continue
        after_s = rank((tried, new))[1]
        kept = new.fits and after_s < (1 - LEAST_GAIN) * before_s
        trials.append(OptionTrial(option, before_s, after_s, new.fits, kept))
        if kept:
            candidate, plan, names = tried, new, tried.xla or ()
    return [(candidate, plan), *found[1:]], trials

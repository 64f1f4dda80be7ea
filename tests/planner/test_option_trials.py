"""Compiler options are tried for the best candidate of a search (planner/option_trials.py)."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxrl.planner.chips import CHIPS
from jaxrl.planner.compilation import Program, compile_programs
from jaxrl.planner.option_trials import try_options
from jaxrl.planner.plan import Plan
from jaxrl.planner.programs import OfflineWorkload, PlannedProgram, RunPrograms
from jaxrl.planner.report import trials_text
from jaxrl.planner.search import estimate, plan_candidate
from jaxrl.planner.topology import Topology, topology
from tests.planner.tiny_job import LENGTHS, MESH, job, machine
from tests.planner.tiny_run import run

LIMIT = "xla_tpu_scoped_vmem_limit_kib"
V5E = Topology("v5e:2x4", "tpu", CHIPS["v5e"], [SimpleNamespace(device_kind="TPU v5 lite")] * 8)


def planned(seconds: float, *, fits: bool = True) -> Plan:
    plan = object.__new__(Plan)  # only what the order and the text depend on
    vars(plan).update(fits=fits, calibrated_step_s=seconds, chip=V5E.chip)
    return plan


class FakeCompiler:
    """Plans whose time depends on learner.xla alone."""

    def __init__(self, plans: dict[tuple[str, ...], Plan | Exception]):
        self.plans, self.compiled = plans, []

    def __call__(self, job, candidate, like: Plan) -> Plan:
        names = candidate.apply(job.cfg).learner.xla
        self.compiled.append(names)
        result = self.plans.get(names, planned(10.0))
        if isinstance(result, Exception):
            raise result
        return result


def tried(plans: dict[tuple[str, ...], Plan | Exception], best: Plan | None, **options):
    cfg = run(**options)
    compiler, planned_job = FakeCompiler(plans), job(cfg, where=V5E)
    found, trials = try_options(
        planned_job, [(estimate(job(cfg), MESH), best)], compile_plan=compiler
    )
    return found[0], trials, compiler.compiled


def test_options_are_kept_where_the_step_gets_faster_and_then_tried_together():
    unknown = ValueError(
        "the compiler of jaxlib 0.9, libtpu 0.0.9 does not know xla_combine;\nleave"
    )
    (candidate, plan), trials, compiled = tried(
        {
            ("overlap",): planned(8.0),
            ("overlap", "prefetch"): planned(8.0),
            ("overlap", "combine"): unknown,
            ("overlap", f"{LIMIT}=32768"): planned(6.0),
            ("overlap", f"{LIMIT}=65536"): planned(5.0, fits=False),
            ("overlap", f"{LIMIT}=98304"): planned(7.0),
        },
        planned(10.0),
    )
    assert candidate.xla == ("overlap", f"{LIMIT}=32768") and plan.calibrated_step_s == 6.0
    assert f"--config.learner.xla=overlap,{LIMIT}=32768" in candidate.overrides(run())
    assert len(compiled) == len(trials) == 6
    assert trials_text(trials, plan).splitlines()[1:] == [
        "  learner.xla=overlap: 10.0 s -> 8.0 s (-20.0%), kept",
        "  learner.xla=prefetch: 8.0 s -> 8.0 s (+0.0%), left out",
        "  learner.xla=combine: not compiled: the compiler of jaxlib 0.9, libtpu 0.0.9 does not "
        "know xla_combine;",
        f"  learner.xla={LIMIT}=32768: 8.0 s -> 6.0 s (-25.0%), kept",
        f"  learner.xla={LIMIT}=65536: 6.0 s -> 5.0 s (-16.7%), left out, does not fit",
        f"  learner.xla={LIMIT}=98304: 6.0 s -> 7.0 s (+16.7%), left out",
    ]


def test_options_of_the_config_stay_and_are_not_tried_again():
    (candidate, _), trials, compiled = tried(
        {}, planned(10.0), learner__xla=("overlap", f"{LIMIT}=65536")
    )
    assert candidate.xla is None and "learner.xla" not in candidate.overrides(run())
    assert [trial.option for trial in trials] == [
        "prefetch",
        "combine",
        f"{LIMIT}=32768",
        f"{LIMIT}=98304",
    ]
    assert compiled[2] == ("overlap", f"{LIMIT}=32768")


@pytest.mark.parametrize("best", [None, planned(10.0, fits=False)])
def test_nothing_is_tried_for_a_candidate_that_does_not_fit(best):
    (_, plan), trials, compiled = tried({}, best)
    assert plan is best and not compiled
    assert "were not tried: no candidate fits" in trials_text(trials, best)


def test_cpus_have_no_options_to_try():
    best = planned(10.0)
    vars(best).update(chip=CHIPS["cpu"])
    found = [(estimate(job(), MESH), best)]
    assert try_options(job(), found, compile_plan=FakeCompiler({})) == (found, [])
    text = trials_text([], best)
    assert text == "compiler options were not tried: jaxrl knows no further ones for CPU core"


def test_programs_that_do_not_read_the_options_are_not_compiled_again(one_device):
    def fail():
        raise AssertionError("lowered again")

    programs = object.__new__(RunPrograms)
    vars(programs).update(cfg=run(), table={"decode": PlannedProgram(fail, "rollout", ())})
    known = {"decode": object.__new__(Program)}
    assert compile_programs(programs, LENGTHS, machine(), known=known)["decode"] is known["decode"]


@pytest.mark.slow
def test_the_tpu_compiler_takes_the_options_and_names_those_that_it_does_not_know():
    pytest.importorskip("libtpu")
    sft = OfflineWorkload(responses_per_example=1, scores_policy=False, has_reference=False)
    cfg = run(learner__xla=("prefetch", "combine", f"{LIMIT}=65536"))
    planned_job = job(cfg, where=topology("v5e:2x4"), workload=sft)
    candidate = estimate(planned_job, MESH)
    best = plan_candidate(planned_job, candidate)
    [(_, plan)], trials = try_options(planned_job, [(candidate, best)])
    assert plan is not None and len(trials) == 3 and not any(trial.error for trial in trials)
    assert plan.calibrated_step_s <= best.calibrated_step_s
    unknown = dataclasses.replace(candidate, xla=("xla_no_such_option=1",))
    with pytest.raises(ValueError, match=r"libtpu .* does not know xla_no_such_option;"):
        plan_candidate(planned_job, unknown, best)

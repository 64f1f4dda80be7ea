"""Serial times of compiled programs: jaxrl/planner/compiled/timeline.py."""

import dataclasses

import pytest

from jaxrl.planner.chips import CHIPS
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.compiled.timeline import Collective, HloDone, HloStart, Kernel, Loop, times

CHIP = dataclasses.replace(
    CHIPS["h100"],
    flops_per_s={"bf16": 100.0, "f32": 50.0},
    memory_bytes_per_s=10.0,
    link_bytes_per_s=1.0,
)
GATHER = Collective("all-gather", 8.0, 2, 1, 1.0, (), "")  # 8 bytes x 1/2 at 1 byte/s: 4 s


def compute(seconds: float) -> Kernel:
    return Kernel({"bf16": 100.0 * seconds}, 0.0)


def test_a_kernel_takes_the_larger_of_its_arithmetic_and_its_traffic():
    assert Kernel({"bf16": 200.0, "f32": 50.0}, 10.0).seconds(CHIP) == 2.0 + 1.0
    assert Kernel({"bf16": 200.0}, 50.0).seconds(CHIP) == 5.0
    assert Kernel({}, 0.0).seconds(CHIP) == 0.0


@pytest.mark.parametrize(
    ("between", "exposed"),
    [((), 4.0), ((compute(1.0),), 3.0), ((compute(3.0), compute(3.0)), 0.0)],
)
def test_a_collective_is_exposed_as_far_as_kernels_do_not_cover_it(between, exposed):
    found = times([compute(1.0), HloStart("a", GATHER), *between, HloDone("a"), compute(2.0)], CHIP)
    assert found.collectives_s == {"all-gather": 4.0}
    assert found.exposed_s == {"all-gather": exposed}
    assert found.kernels_s == 3.0 + sum(one.seconds(CHIP) for one in between)
    assert found.total_s == found.kernels_s + exposed
    assert found.covered("all-gather") == 1 - exposed / 4


def test_collectives_queue_for_the_link():
    # the second begins when the first ends, after 4 s, and ends after 8: 5 s of kernels cover it
    steps = [HloStart("a", GATHER), HloStart("b", GATHER), compute(5.0), HloDone("a"), HloDone("b")]
    assert times(steps, CHIP).exposed_s == {"all-gather": 3.0}


def test_a_wait_counts_for_the_collective_that_has_the_link():
    reduce = dataclasses.replace(GATHER, kind="all-reduce")  # twice as long: 8 s
    steps = [HloStart("a", GATHER), HloStart("b", reduce), HloDone("b"), HloDone("a")]
    assert times(steps, CHIP).exposed_s == {"all-gather": 4.0, "all-reduce": 8.0}


def test_a_loop_multiplies_kernels_and_collectives():
    body = [HloStart("a", GATHER), compute(1.0), HloDone("a")]
    found = times([Loop(3.0, body), compute(1.0)], CHIP)
    assert (found.kernels_s, found.exposed_s) == (4.0, {"all-gather": 9.0})


def test_the_schedule_of_a_program_has_its_collectives_and_the_kernels_between():
    text = """
%wrapped (p: f32[4]) -> f32[2] {
  %p = f32[4]{0} parameter(0)
  ROOT %s = f32[2]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[2], w: f32[4]) -> f32[4] {
  %x = f32[2]{0} parameter(0)
  %w = f32[4]{0} parameter(1)
  %g = (f32[2]{0}, f32[4]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %n = f32[4]{0} negate(%w)
  %h = f32[4]{0} all-gather-done(%g)
  %r = ((f32[4]{0}), f32[2]{0}) async-start(%n), calls=%wrapped
  %e = f32[2]{0} async-done(%r)
  ROOT %y = f32[4]{0} add(%h, %n)
}
"""
    found = program_cost(text).steps
    kinds = [type(step).__name__ for step in found]
    assert kinds == ["HloStart", "Kernel", "HloDone", "HloStart", "HloDone", "Kernel"]
    assert [step.collective.kind for step in found if isinstance(step, HloStart)] == [
        "all-gather",
        "reduce-scatter",
    ]
    # 32 bytes of the negation take 3.2 s of the gather's 16 / 2; the reduce-scatter waits
    assert times(found, CHIP).exposed_s == pytest.approx(
        {"all-gather": 8.0 - 3.2, "reduce-scatter": 8.0}
    )


def test_a_kernel_has_the_cycles_that_the_tpu_compiler_estimates():
    text = """
%double (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %d = f32[4]{0} add(%p, %p), backend_config={"window_config":{"estimated_cycles":"7"}}
}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4]{0} get-tuple-element(%s), index=1
  %f = f32[4]{0} fusion(%x), calls=%double, backend_config={"estimated_cycles":"300","n":[]}
  %one = s32[] constant(1)
  %n = s32[] add(%i, %one), backend_config={"window_config":{"estimated_cycles":"20"}}
  ROOT %t = (s32[], f32[4]) tuple(%n, %f)
}

%more (s: (s32[], f32[4])) -> pred[] {
  %s.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[4]) tuple(%zero, %x.1)
  %loop = (s32[], f32[4]) while(%first), condition=%more, body=%body
  %y = f32[4]{0} get-tuple-element(%loop), index=1
  ROOT %k = f32[4]{0} negate(%y), backend_config={"estimated_cycles":"9223372036854775807"}
}
"""
    cost = program_cost(text)
    assert cost.estimated_cycles == 3 * (300 + 20)  # not those inside the fusion
    chip = dataclasses.replace(CHIP, clock_hz=10.0)
    # the negation has no estimate: 32 bytes take 3.2 s
    by_compiler = times(cost.steps, chip, Kernel.compiler_seconds)
    assert by_compiler.kernels_s == pytest.approx(3 * (30.0 + 2.0) + 3.2)
    assert times(cost.steps, CHIP, Kernel.compiler_seconds) == times(cost.steps, CHIP)


def test_a_collective_on_a_sparse_core_runs_from_its_update_to_its_end():
    """A gather of rows counts as the rows that it reads, like every kernel."""
    text = """
%rows (p: f32[1000,2], i: s32[4]) -> f32[4,2] {
  %p.1 = f32[1000,2]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  ROOT %r = f32[4,2]{1,0} gather(%p.1, %i), slice_sizes={1,2}
}, execution_thread="sparsecore"

%offload (p: f32[1000,2], i: s32[4]) -> f32[4,2] {
  %p.2 = f32[1000,2]{1,0} parameter(0)
  %i.1 = s32[4]{0} parameter(1)
  %c = ((f32[1000,2], s32[4]), f32[4,2], u32[]) call-start(%p.2, %i.1), to_apply=%rows
  ROOT %d.1 = f32[4,2]{1,0} call-done(%c)
}, execution_thread="sparsecore"

%gather (p: f32[2]) -> f32[4] {
  %p = f32[2]{0} parameter(0)
  ROOT %g = f32[4]{0} all-gather(%p), replica_groups=mesh['fsdp'=2] {'fsdp'}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: f32[2], w: f32[4], table: f32[1000,2], ids: s32[4]) -> f32[4] {
  %x = f32[2]{0} parameter(0)
  %w = f32[4]{0} parameter(1)
  %table = f32[1000,2]{1,0} parameter(2)
  %ids = s32[4]{0} parameter(3)
  %o = ((), (), s32[8]{0}) custom-call-start(), called_computations={%offload}
  %v = ((f32[1000,2], s32[4]), f32[4,2], s32[8]{0}) custom-call-update(%o, %table, %ids)
  %e = f32[4,2]{1,0} custom-call-done(%v)
  %s = ((), (), s32[8]{0}) custom-call-start(), called_computations={%gather}
  %a = f32[4]{0} negate(%w)
  %u = ((f32[2]{0}), f32[4]{0}, s32[8]{0}) custom-call-update(%s, %x)
  %b = f32[4]{0} negate(%w)
  %d = f32[4]{0} custom-call-done(%u)
  ROOT %y = f32[4]{0} add(%d, %b)
}
"""
    cost = program_cost(text)
    kinds = [type(step).__name__ for step in cost.steps]
    assert kinds == ["Kernel", "HloDone", "Kernel", "HloStart", "Kernel", "HloDone", "Kernel"]
    assert cost.collectives_by_kind() == {"all-gather": {"count": 1, "bytes": 16}}
    # Rows and ids, two negations, the gather of the weight, the sum.
    assert cost.bytes_accessed == (2 * 32 + 16) + 2 * 32 + (8 + 16) + 48
    assert times(cost.steps, CHIP).exposed_s == pytest.approx({"all-gather": 8.0 - 3.2})


def test_a_collective_that_a_tpu_splits_over_fusions_ends_in_the_last():
    text = """
%start (p: bf16[8]) -> (bf16[8], bf16[32]) {
  %p = bf16[8]{0} parameter(0)
  %g = bf16[32]{0} all-gather(%p), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %s = (bf16[8]{0}, bf16[32]{0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%done (p: bf16[8]) -> bf16[32] {
  %p.1 = bf16[8]{0} parameter(0)
  %g.1 = bf16[32]{0} all-gather(%p.1), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %d = bf16[32]{0} custom-call(%g.1), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[8], w: bf16[8]) -> bf16[32] {
  %x = bf16[8]{0} parameter(0)
  %w = bf16[8]{0} parameter(1)
  %a = (bf16[8]{0}, bf16[32]{0}) fusion(%x), kind=kCustom, calls=%start
  %y = bf16[8]{0} get-tuple-element(%a), index=0
  %n = bf16[8]{0} negate(%w)
  ROOT %b = bf16[32]{0} fusion(%y), kind=kCustom, calls=%done
}
"""
    found = [type(step).__name__ for step in program_cost(text).steps]
    assert found == ["HloStart", "Kernel", "Kernel", "HloDone", "Kernel"]

"""The plan of a pipeline: idle time by hand, kept activations against the compiled program."""

import dataclasses

import jax
import pytest

from jaxrl.models.mesh_check import check_mesh
from jaxrl.planner.pipeline import PipelinePlan, pipeline_plan
from jaxrl.planner.programs import run_programs
from jaxrl.planner.report import pipeline_text
from sharding import MESH_AXES, PIPELINE, make_mesh
from tests.models.resized import resized
from tests.planner.tiny_run import TINY, run

DEEP = resized(TINY, L=16)


def staged(rows: int, **changes):
    """A run whose micro-batch has this number of rows of 128 tokens per rank, in two stages."""
    return run(
        mesh__stage=2,
        mesh__fsdp=2,
        learner__token_budget=rows * 128,
        learner__buckets=(128,),
        learner__mini_batch_prompts=8,
        **changes,
    )


def in_order(schedule: str, rows: int, **changes):
    return staged(rows, learner__pipeline_schedule=schedule, learner__halvings=0, **changes)


def plan_of(cfg, **sizes) -> PipelinePlan | None:
    return pipeline_plan(cfg, DEEP, dict.fromkeys(MESH_AXES, 1) | sizes, item_bytes=4)


def test_the_bubble_and_the_kept_activations_are_those_of_a_hand_count():
    cfg = staged(4, learner__remat="full")
    # 5 ticks, of which a stage is idle in one; in each it keeps the inputs [128, 64] of 8 layers,
    # of which a tensor device has half the tokens
    plan = plan_of(cfg, stage=2, fsdp=2, tensor=2)
    assert plan is not None
    kept = 5 * 8 * 128 * 128
    assert plan == PipelinePlan("gpipe", 2, rows=4, bubble=1 / 5, activation_bytes=kept)
    assert pipeline_text(plan) == (
        "pipeline (gpipe): 2 stages, 4 rows per rank, idle 20% of 5 ticks; "
        "activations kept for backward: 640.00 KiB"
    )
    # 1F1B keeps three rows
    rows = in_order("1f1b", 4, learner__remat="full")
    fewer = plan_of(rows, stage=2, fsdp=2, tensor=2)
    assert fewer == dataclasses.replace(plan, schedule="1f1b", activation_bytes=3 * kept // 5)
    # with whole residuals, all of the tokens
    whole = staged(4, learner__remat="full", learner__shard_residual=False)
    twice = plan_of(whole, stage=2, fsdp=2, tensor=2)
    assert twice is not None
    assert twice.activation_bytes == 2 * plan.activation_bytes
    # sequence devices share a row, and groups of four layers keep one input
    shared = plan_of(staged(4, learner__remat="full?group=4"), stage=2, sequence=2, tensor=2)
    assert shared is not None
    assert shared.activation_bytes == 5 * 2 * 64 * 128
    assert plan_of(run()) is None


def test_a_model_whose_layers_the_stages_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match=r"16 layers over stage=3"):
        check_mesh(DEEP, {"stage": 3}, PIPELINE)


@pytest.mark.slow
def test_kept_activations_explain_how_temporaries_grow_with_rows():
    """The rest is a few arrays of the residual stream before and after the stages.

    In particular, weights are not kept once per tick.
    """
    temporaries, kept = growth("gpipe")
    rest = 8 * 128 * 64 * 4  # one array of eight rows
    assert kept < temporaries < kept + 4 * rest


@pytest.mark.slow
def test_temporaries_of_1f1b_grow_by_the_input_of_the_first_layer_only():
    temporaries, kept = growth("1f1b")
    assert kept == 0
    assert temporaries < 8 * 128 * 64 * 4  # an array of eight rows, which both stages share


def growth(schedule: str) -> tuple[int, int]:
    """Bytes of temporaries, and of activations by the plan, from 4 to 12 rows per rank."""
    temporaries, kept = [], []
    for rows in (4, 12):
        cfg = in_order(schedule, rows, learner__remat="full")
        with jax.set_mesh(make_mesh(None, stage=2, fsdp=2, tensor=2)):
            program = run_programs(cfg, DEEP, 2**30).table["accumulate"].lower().compile()
        memory = program.memory_analysis()
        assert memory is not None
        temporaries.append(memory.temp_size_in_bytes)
        plan = plan_of(cfg, stage=2, fsdp=2, tensor=2)
        assert plan
        kept.append(plan.activation_bytes)
    return temporaries[1] - temporaries[0], kept[1] - kept[0]

"""A job of the tiny model, and settings of it, for the tests of the planner's formulas."""

import dataclasses

import jax

from jaxrl.planner.chips import CHIPS
from jaxrl.planner.programs import Lengths
from jaxrl.planner.sizes import CandidateSettings, Job
from jaxrl.planner.topology import Topology
from tests.models.resized import resized
from tests.planner.tiny_run import TINY, run

LENGTHS = Lengths(64, 64)
GIB = 2**30
SMALL = resized(TINY, D=32, N=4, K=4, H=8, F=64)
MESH = CandidateSettings({"fsdp": 8}, 256, "full")
OFFLOADS = {
    (),
    ("optimizer",),
    ("optimizer", "reference"),
    ("optimizer", "gradients", "reference"),
    ("policy",),
    ("optimizer", "reference", "policy"),
    ("optimizer", "gradients", "reference", "policy"),
}


def machine(memory_bytes: float = float(GIB)) -> Topology:
    chip = dataclasses.replace(CHIPS["cpu"], memory_bytes=memory_bytes)
    return Topology("cpu:8", "cpu", chip, jax.devices()[:8])


def job(cfg=None, model=TINY, where=None, **changes) -> Job:
    return Job(cfg or run(), model, where or machine(), LENGTHS, **changes)

"""The experts that the engine records are those of the trainer at the same places.

Engine and trainer compute the same on CPU, so they choose the same experts: in decode, in decode
mixed with prefill, with speculation, after preemption, and with pages of the prefix cache.
"""

import jax
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.models.packed import forward_routed
from jaxrl.models.router_replay import recorded, recording
from sharding import TRAIN
from tests.engine.engine_cases import FAMILIES, limit_pages, make_engine, make_params, make_requests
from tests.marks import graded

CFG = FAMILIES["qwen3_moe"]


def generate(engine, params, requests):
    """(tokens, experts) of every request."""
    slots = [engine.submit(request) for request in requests]
    made = {slot: ([], []) for slot in slots}
    while engine.n_unfinished:
        for new in engine.generate(params):
            tokens, experts = made[new.slot]
            tokens.extend(new.tokens.tolist())
            experts.append(new.experts)
    return [(tokens, np.concatenate(experts)) for tokens, experts in (made[s] for s in slots)]


def trainer_experts(params, requests, made) -> list[np.ndarray]:
    """The experts [n, L, k] of the tokens before the sampled ones."""
    T = 256
    tokens, segments = np.zeros((len(made), T), np.int32), np.zeros((len(made), T), np.int32)
    for b, (request, (sampled, _)) in enumerate(zip(requests, made, strict=True)):
        row = np.concatenate([request.tokens, sampled])[:-1]
        tokens[b, : len(row)], segments[b, : len(row)] = row, 1
    positions = np.tile(np.arange(T, dtype=np.int32), (len(made), 1))

    @jax.jit
    def run(params, *rows):
        return recorded(forward_routed(recording(params), *rows, rules=TRAIN)[1], np.uint8)

    spec = TRAIN.spec("batch", "time")
    experts = np.asarray(
        run(params, *(jax.device_put(a, spec) for a in (tokens, segments, positions)))
    )
    firsts = [len(request.tokens) - 1 for request in requests]
    pairs = zip(firsts, made, strict=True)
    return [experts[b, first : first + len(out[0])] for b, (first, out) in enumerate(pairs)]


CASES = {
    "decode and mixed prefill": (dict(steps_per_dispatch=4), {}),
    "speculation": (dict(spec_tokens=3), dict(sampling=SamplingConfig(temperature=0.1))),
    "preemption": (dict(n_pages=16), dict(max_tokens=40, ignore_stop=True)),
}


@pytest.mark.bitwise
@pytest.mark.parametrize("case", graded(CASES))
def test_recorded_experts_are_those_of_the_trainer(case, one_device):
    settings, more = CASES[case]
    params, requests = make_params(CFG), make_requests(6, **(dict(max_tokens=12) | more))
    engine = make_engine(CFG, keep_experts=True, filters=(), **settings)
    if case == "preemption":
        limit_pages(engine, 6)
    made = generate(engine, params, requests)
    if case == "preemption":
        assert engine.take_stats().n_preempted > 0
    for (tokens, experts), want in zip(made, trainer_experts(params, requests, made), strict=True):
        assert experts.dtype == np.uint8 and experts.shape == (len(tokens), CFG.L, 3)
        np.testing.assert_array_equal(experts, want)

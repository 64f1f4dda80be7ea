"""Stress test of the engine: each of many requests has the result of running alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import RolloutConfig, SamplingConfig
from jaxrl.engine.api import Request
from jaxrl.engine.engine import PagedEngine
from jaxrl.models.config import uniform_decoder
from sharding.rules import DECODE
from tests.engine.engine_cases import make_params

MICRO = uniform_decoder("llama", L=1, D=16, N=2, K=1, H=8, F=16, V=32, max_len=256)
LARGE = RolloutConfig(
    max_num_seqs=128, max_num_batched_tokens=8192, steps_per_dispatch=2, n_pages=100
)
SMALL = RolloutConfig(max_num_seqs=8, max_num_batched_tokens=512, steps_per_dispatch=2, n_pages=12)


def make_engine(rollout: RolloutConfig, **changes) -> PagedEngine:
    rollout = dataclasses.replace(rollout, **changes)
    return PagedEngine(MICRO, rollout, rules=DECODE, dtype=jnp.float32, max_len=256, eos_ids=(1,))


def make_kinds(rng: np.random.Generator, n_kinds: int) -> list[Request]:
    """Prompts of 1 to 200 tokens with common prefixes, responses of 1 to 8 tokens."""
    stems = [rng.integers(2, 32, 200, dtype=np.int32) for _ in range(12)]
    kinds = []
    for i in range(n_kinds):
        prompt = stems[rng.integers(len(stems))][: rng.integers(1, 200)]
        end = rng.integers(2, 32, rng.integers(1, 8), dtype=np.int32)
        temperature = float(rng.choice([0.0, 1.0]))
        kinds.append(
            Request(
                tokens=np.concatenate([prompt, end]),
                max_tokens=int(rng.integers(1, 9)),
                sampling=SamplingConfig(temperature=temperature),
                prompt_id=i,
            )
        )
    return kinds


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rollout", "n_requests", "n_kinds", "min_hit_rate"),
    [(SMALL, 1_000, 40, 0.25), pytest.param(LARGE, 10_000, 400, 0.5, marks=pytest.mark.slow)],
    ids=["small", "large"],
)
def test_many_requests_end_as_they_would_alone(
    one_device, rollout, n_requests, n_kinds, min_hit_rate
):
    rng = np.random.default_rng(0)
    params = make_params(MICRO)
    kinds = make_kinds(rng, n_kinds)
    engine = make_engine(rollout)
    kind_of: dict[int, int] = {}
    made: dict[int, tuple[list, list]] = {}
    ended: list[tuple[int, list, list]] = []
    n_submitted = n_cancelled = 0
    while n_submitted < n_requests or engine.n_unfinished:
        for _ in range(min(int(rng.integers(0, 250)), n_requests - n_submitted)):
            kind = int(rng.integers(n_kinds))
            slot = engine.submit(kinds[kind])
            kind_of[slot], made[slot] = kind, ([], [])
            n_submitted += 1
        for slot in rng.permutation(list(kind_of))[: rng.integers(0, 4)]:
            engine.free(int(slot))
            del kind_of[int(slot)]
            n_cancelled += 1
        for out in engine.generate(params):
            tokens, logps = made[out.slot]
            tokens += out.tokens.tolist()
            logps += out.logp.tolist()
            if out.finish:
                ended.append((kind_of.pop(out.slot), *made.pop(out.slot)))
    assert not kind_of and len(ended) + n_cancelled == n_requests
    stats = engine.take_stats()
    assert stats.cache_used_max == 1.0  # pages of earlier requests were evicted
    assert stats.n_prefill_tokens > 0
    n_prompt_tokens = stats.n_cached_tokens + stats.n_prefill_tokens
    assert stats.n_cached_tokens > min_hit_rate * n_prompt_tokens
    assert engine.scheduler.pool.n_used == 0
    alone = make_engine(rollout, max_num_seqs=2, prefix_cache=False)
    for kind in range(0, n_kinds, 8):
        alone.submit(kinds[kind])
        want = ([], [])
        while alone.n_unfinished:
            for out in alone.generate(params):
                want[0].extend(out.tokens.tolist())
                want[1].extend(out.logp.tolist())
        same = [(tokens, logps) for k, tokens, logps in ended if k == kind]
        assert same and all(one == want for one in same)

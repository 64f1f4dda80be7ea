"""Memory of updates with rows of up to 32,768 tokens on 8 devices: Ulysses, ring and both."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.keys import AlgorithmConfig, LearnerConfig, MeshConfig, RunConfig
from jaxrl.layout import training_rules
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.programs import abstract_batch
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import make_update
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.rope_config import Rope
from sharding import make_mesh
from tests.learner.tiny_policy import QUICK_COMPILE
from tests.models.resized import resized

YARN = Rope(theta=1e6, kind="yarn", factor=4.0, original_len=8192, attention_factor=1.1386294)
MODEL = uniform_decoder(
    "qwen2", L=1, D=32, N=8, K=2, H=8, F=64, V=64, tied=True, qkv_bias=True, rope=YARN
)
METHODS = {
    "ulysses": dict(sequence_parallel="ulysses"),
    "ring": dict(sequence_parallel="ring"),
    "both": dict(sequence_parallel="ring", ulysses_size=2),
}


def run_config(row_len: int, method: str, n_devices: int, xla: tuple[str, ...] = ()) -> RunConfig:
    learner = LearnerConfig(
        token_budget=row_len, halvings=0, logprob_chunk=1024, xla=xla, **METHODS[method]
    )
    mesh = MeshConfig(fsdp=1, sequence=n_devices)
    return RunConfig(algorithm=AlgorithmConfig(old_logp="rollout"), learner=learner, mesh=mesh)


@functools.cache
def temporaries(row_len: int, method: str, n_devices: int, n_kv_heads: int = 2) -> int:
    """Bytes per device that the gradient of one row needs besides its arguments and results."""
    cfg = run_config(row_len, method, n_devices, QUICK_COMPILE)
    rules = training_rules(cfg)
    specs = decoder_specs(resized(MODEL, K=n_kv_heads))
    mesh = make_mesh(sequence=n_devices)
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(cfg.learner, 10, specs)
        state = abstract_state(specs, jnp.dtype("float32"), optimizer, rules, mesh)
        update = make_update(cfg, optimizer, rules)
        rows, row_len = cfg.learner.shapes[-1]
        batch = abstract_batch(rules.n_shards("batch") * rows, row_len, rules)
        lowered = update.lowerings(state, batch)["accumulate"]()
        memory = lowered.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ulysses", "both")]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["ring", *SLOW])
def test_memory_per_device_grows_linearly_in_its_tokens(method):
    at_8k, at_16k, at_32k = (temporaries(n, method, 8) for n in (8192, 16384, 32768))
    assert at_32k - at_16k == pytest.approx(2 * (at_16k - at_8k), rel=0.05)
    assert at_32k < 2.05 * at_16k


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memory_per_device_depends_on_its_tokens_and_not_on_the_row(method):
    """Rows of 8,192 tokens on 2 devices and of 32,768 on 8: 4,096 tokens per device.

    With a kv head for every device: Ulysses gives a device whole rows of at least one head.
    """
    few, many = (temporaries(4096 * n, method, n, n_kv_heads=8) for n in (2, 8))
    assert many < 1.15 * few

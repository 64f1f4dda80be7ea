"""A tiny decoder, random rollouts and one update with them on any mesh and packing."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.config.keys import (
    AlgorithmConfig,
    DataConfig,
    LearnerConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from jaxrl.data.packing import pack
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.state import init_state
from jaxrl.learner.step import make_score, make_update, take_tokens
from jaxrl.models.config import DecoderConfig, MLAConfig, uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split
from jaxrl.models.rope_config import Rope
from jaxrl.models.spec import init_params, is_spec, partition_specs
from jaxrl.models.state_mixers import GatedDeltaNetConfig
from jaxrl.runtime.flat_program import unflatten
from jaxrl.types import TrainingSample
from sharding import Rules, make_mesh
from sharding.rules import TRAIN
from tests.models.resized import resized

MODEL = uniform_decoder("qwen2", L=1, D=16, N=4, K=2, H=8, F=32, V=64, tied=True, qkv_bias=True)
MOE = resized(
    MODEL,
    family="qwen3_moe",
    L=2,
    qkv_bias=False,
    E=4,
    top_k=2,
    F_expert=16,
    shared_F=8,
    qk_norm=True,
    stacked=True,
)
# Two kinds of layers, of which one has a state instead of keys and values. The states of random
# weights are tiny: with the usual eps, the norm of what is read would amplify rounding 1,000 times.
DELTA = dataclasses.replace(
    MODEL.layers[0], mixer=GatedDeltaNetConfig(K=2, N=4, D=8, V=12, conv_len=3)
)
HYBRID = dataclasses.replace(
    MODEL,
    family="qwen3_5",
    unit_offset=True,
    norm_eps=1e-3,
    layers=(DELTA, MODEL.layers[0], DELTA),
)
# Keys and values of all heads are computed from one latent per token. Keys are wider than values.
LATENT = dataclasses.replace(
    MODEL,
    family="deepseek_v3",
    layers=(
        dataclasses.replace(
            MODEL.layers[0],
            mixer=MLAConfig(N=4, nope=6, rotated=4, V=8, latent=8, rope=Rope(), q_rank=8),
        ),
    ),
)
# Options of XLA that halve the compile time of these tiny programs.
QUICK_COMPILE = ("xla_backend_optimization_level=0", "xla_llvm_disable_expensive_passes=true")
# eps: Adam's first step is g / (|g| + eps), which at 1e-8 turns a rounding error of a tiny g into a
# full step.
LEARNER = LearnerConfig(
    eps=1e-3,
    lr=1e-2,
    logprob_chunk=16,
    remat="none",
    clip_norm=0.5,
    weight_decay=0.1,
    token_budget=128,
    xla=QUICK_COMPILE,
)


def run_config(learner: dict | None = None, temperature: float = 0.7, **algorithm) -> RunConfig:
    return RunConfig(
        algorithm=AlgorithmConfig(**algorithm),
        learner=dataclasses.replace(LEARNER, **(learner or {})),
        rollout=RolloutConfig(sampling=SamplingConfig(temperature=temperature)),
        data=DataConfig(max_response_len=12),
    )


def rollouts(n: int = 16, seed: int = 0) -> list[TrainingSample]:
    """Prompts of 2-9 tokens with responses of 1-12 and an advantage of either sign."""
    rng = np.random.default_rng(seed)

    def one(i: int) -> TrainingSample:
        prompt_len, response_len = rng.integers(2, 10), rng.integers(1, 13)
        tokens = rng.integers(0, MODEL.V, prompt_len + response_len).astype(np.int32)
        logp = -4.0 + 0.3 * rng.standard_normal(response_len).astype(np.float32)
        return TrainingSample(
            prompt_tokens=tokens[:prompt_len],
            tokens=tokens[prompt_len:],
            loss_mask=np.ones(response_len, bool),
            rollout_logp=logp.astype(np.float32),
            prompt_id=i,
            advantages=np.full(response_len, rng.standard_normal(), np.float32),
        )

    return [one(i) for i in range(n)]


def batches(samples: list[TrainingSample], *, row_len: int, token_budget: int, n_ranks: int = 1):
    shapes = ((token_budget // row_len, row_len),)
    packed = pack(samples, shapes=shapes, align=8, n_ranks=n_ranks)
    return [p.batch for p in packed]


@functools.cache
def host_params(model: DecoderConfig, seed: int, dtype: str):
    """Weights as host arrays, with ten times the usual spread for peaked logits.

    They are drawn on one device, so that a new mesh or rule compiles nothing.
    """
    if model.stacked:
        listed = dataclasses.replace(model, stacked=False)
        return stack_layers(host_params(listed, seed, dtype), model)
    with jax.set_mesh(make_mesh()):
        params = init_params(jax.random.key(seed), decoder_specs(model), TRAIN, jnp.dtype(dtype))
    scaled = lambda p: p * p.dtype.type(10) if p.ndim > 1 else p  # noqa: E731
    return jax.tree.map(scaled, jax.device_get(params))


def new_params(
    dtype=jnp.float32, model: DecoderConfig = MODEL, seed: int = 0, rules: Rules = TRAIN
):
    """`host_params` on the current mesh, sharded by `rules`; independent of stacking."""
    params = host_params(model, seed, jnp.dtype(dtype).name)
    return put_params(params, model, rules)


def put_params(params, model: DecoderConfig, rules: Rules):
    """Host parameters as new arrays on the current mesh, sharded by `rules`."""
    mesh = jax.sharding.get_mesh()

    def put(p: np.ndarray, spec: jax.P) -> jax.Array:
        # A copy: updates donate their parameters, and the host arrays are kept.
        return jax.device_put(p, NamedSharding(mesh, spec), may_alias=False)

    return jax.tree.map(put, params, partition_specs(decoder_specs(model), rules))


def stack_layers(params, model: DecoderConfig):
    """Stacks the layers of a parameter tree with a list of layers."""
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = re.sub(r"layers\W+\d+\W+", "layers.", jax.tree_util.keystr(path))
        leaves.setdefault(name, []).append(leaf)
    joined = [np.stack(found) if "layers" in name else found[0] for name, found in leaves.items()]
    specs = decoder_specs(model)
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(specs, is_leaf=is_spec)]
    by_name = dict(zip(leaves, joined, strict=True))
    return jax.tree.unflatten(
        jax.tree.structure(specs, is_leaf=is_spec), [by_name[n] for n in names]
    )


def programs(cfg: RunConfig, model: DecoderConfig = MODEL, rules: Rules = TRAIN):
    """(optimizer, update, score) of a config, cached so that tests share compiled programs."""
    return _programs(cfg, model, rules)


@functools.cache
def _programs(cfg: RunConfig, model: DecoderConfig, rules: Rules):
    optimizer = make_optimizer(cfg.learner, 10, split(decoder_specs(model))[0])
    return optimizer, make_update(cfg, optimizer, rules), make_score(cfg, rules)


def new_state(
    cfg: RunConfig, dtype=jnp.float32, model: DecoderConfig = MODEL, rules: Rules = TRAIN
):
    return init_state(new_params(dtype, model, rules=rules), programs(cfg, model, rules)[0])


def update_once(
    cfg: RunConfig,
    micro_batches,
    mesh_sizes: dict,
    model: DecoderConfig = MODEL,
    rules: Rules = TRAIN,
):
    """(gradient of the loss, metrics, updated parameters) as host arrays."""
    with jax.set_mesh(make_mesh(**mesh_sizes)):
        state = new_state(cfg, model=model, rules=rules)
        _, update, _ = programs(cfg, model, rules)
        total = update.zeros(state.params)
        balance = update.balance(state.params, micro_batches)
        for batch in micro_batches:
            total = update.accumulate(state.params, None, total, update.put(batch), balance)
        grads = jax.device_get(
            jax.tree.map(lambda g: g / total.sums.weight, unflatten(total.grads))
        )
        state, metrics = update.update(state, micro_batches)
        return grads, metrics, jax.device_get(state.params)


def all_numbers(
    cfg: RunConfig, micro_batches, mesh_sizes: dict, model: DecoderConfig, rules: Rules
) -> tuple:
    """(logp and entropy of every token, gradient of the loss, metrics, updated parameters)."""
    _, update, score = programs(cfg, model, rules)
    with jax.set_mesh(make_mesh(**mesh_sizes)):
        params = new_params(model=model, rules=rules)
        scores = [
            [take_tokens(x, rules) for x in score(params, update.put(b))] for b in micro_batches
        ]
    return scores, *update_once(cfg, micro_batches, mesh_sizes, model, rules)

"""The gap between rollout and training of a mixture of experts, with and without router replay.

python -m scripts.router_replay_gap

A random model samples with int8 weights. The policy with the weights that are trained then scores
the samples: with its own experts, and with those of the rollout (R3). Prints one line per case:
mean |difference| of the logprobs, KL of the samples (k3), and the fraction of (token, layer) pairs
for which training's router chooses other experts than the rollout.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import (
    DataConfig,
    LearnerConfig,
    RolloutConfig,
    RunConfig,
)
from jaxrl.data.packing import pack_samples
from jaxrl.data.routing import to_array
from jaxrl.engine.api import Request
from jaxrl.engine.engine import PagedEngine
from jaxrl.learner.loss import hidden_states, score_and_record
from jaxrl.learner.step import put_batch
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.quantize import quantize_int8
from jaxrl.models.router_replay import routing_shape
from jaxrl.models.spec import init_params
from jaxrl.types import Batch, TrainingSample
from sharding import DECODE, TRAIN, make_mesh

SHAPE: dict[str, Any] = dict(L=8, D=64, N=4, K=2, H=16, F=96, V=512, E=16, top_k=2, F_expert=32)
MODEL = uniform_decoder("qwen3_moe", **SHAPE, stacked=True, max_len=256)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--response-len", type=int, default=64)
    args = parser.parse_args()
    cfg = RunConfig(
        data=DataConfig(max_prompt_len=64, max_response_len=args.response_len),
        rollout=RolloutConfig(max_num_seqs=32),
        learner=LearnerConfig(token_budget=1024, router_replay="R3"),
    )
    with jax.set_mesh(make_mesh()):
        params = init_params(jax.random.key(0), decoder_specs(MODEL), TRAIN, jnp.float32)
        params = jax.tree.map(lambda w: 3 * w if w.ndim > 2 else w, params)  # peaked distributions
        samples = sampled(params, cfg, args.prompts)
        print("weights of the rollout: int8; of training: float32")
        for replay in ("off", "R3"):
            difference, kl, changed, n = gap(params, samples, cfg, replays=replay == "R3")
            print(
                f"{replay:>4}: mean |difference of logprobs| {difference:.5f}, KL {kl:.6f}, "
                f"other experts {changed:.4f} ({n} tokens)"
            )


def sampled(params, cfg: RunConfig, n_prompts: int) -> list[TrainingSample]:
    """Responses of the model with int8 matrices."""
    engine = PagedEngine(
        MODEL, cfg.rollout, rules=DECODE, dtype=jnp.float32, max_len=256, keep_experts=True
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, MODEL.V, 32, dtype=np.int32) for _ in range(n_prompts)]
    requests = [
        Request(tokens, cfg.data.max_response_len, prompt_id=i) for i, tokens in enumerate(prompts)
    ]
    found = {engine.submit(request): (request, []) for request in requests}
    weights = quantize_int8(params, jnp.float32)
    while engine.n_unfinished:
        for new in engine.generate(weights):
            found[new.slot][1].append(new)
    return [
        TrainingSample(
            prompt_tokens=request.tokens,
            tokens=np.concatenate([one.tokens for one in made]),
            loss_mask=np.ones(sum(len(one.tokens) for one in made), bool),
            rollout_logp=np.concatenate([one.logp for one in made]),
            experts=np.concatenate([one.experts for one in made]),
        )
        for request, made in found.values()
    ]


def gap(params, samples, cfg: RunConfig, *, replays: bool) -> tuple[float, float, float, int]:
    """(mean |difference|, KL, fraction of other experts, tokens) of all samples."""
    score = jax.jit(functools.partial(score_and_record, cfg=cfg, rules=TRAIN))
    load = jax.jit(functools.partial(hidden_states, cfg=cfg, rules=TRAIN, remat="none"))
    routing, sums = routing_shape(MODEL), np.zeros(3)
    for packed in pack_samples(samples, cfg, 1):
        batch: Batch = packed.batch
        given = to_array(batch.experts, batch.tokens.shape, routing)
        inputs = put_batch(batch, TRAIN, routing=routing if replays else None)
        logp, _, experts = map(np.asarray, score(params, inputs))
        log_ratio, mask = logp - batch.rollout_logp, batch.mask > 0
        same = np.sort(experts, axis=-1) == np.sort(given, axis=-1)
        differs = (~same.all(axis=-1)[mask]).mean(axis=-1).sum()
        if replays:  # they are the same: what the router would choose
            differs = float(load(params, inputs)[1].changed.mean())
        kl = np.exp(log_ratio[mask]) - 1 - log_ratio[mask]
        sums += [np.abs(log_ratio[mask]).sum(), kl.sum(), differs]
    n = sum(s.n_loss_tokens for s in samples)
    difference, kl, changed = sums / n
    return difference, kl, changed, n


if __name__ == "__main__":
    main()

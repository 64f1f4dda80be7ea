"""Tiny models of every family, engines and requests for them, and the trainer's logprobs.

Engines of one model share their compiled programs if `SMALL` sets their shapes: the page pool has
the same size for any number of slots, and `limit_pages` makes it scarce without another shape.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RolloutConfig, SamplingConfig
from jaxrl.engine.api import Request
from jaxrl.engine.device.model_runner import COPIES, COPIES_PER_CALL, Dispatch, Variant
from jaxrl.engine.device.sampling import FILTERS
from jaxrl.engine.engine import PagedEngine
from jaxrl.kernels.logprob import token_scores
from jaxrl.models.config import BOTH_NORMS, DecoderConfig, uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.families import gemma4, gpt_oss
from jaxrl.models.families.rotary import GLOBAL, LOCAL
from jaxrl.models.packed import forward_packed
from jaxrl.models.rope_config import Rope
from jaxrl.models.spec import init_params
from jaxrl.models.state_mixers import GatedDeltaNetConfig, ShortConvConfig
from sharding.rules import DECODE, TRAIN, Rules

SHAPE = dict(L=2, D=64, N=4, K=2, H=16, F=96, V=512, max_len=512)
GEMMA = dict(norms=BOTH_NORMS, unit_offset=True, act="gelu_tanh", embed_scale=8.0, tied=True)
FAMILIES = {
    "llama": uniform_decoder("llama", **SHAPE, rope=Rope(500_000.0, "llama3", 8.0)),
    "qwen2": uniform_decoder("qwen2", **SHAPE, qkv_bias=True, tied=True),
    "qwen3": uniform_decoder("qwen3", **SHAPE, qk_norm=True),
    "mistral": uniform_decoder("mistral", **SHAPE, windows=(48, 48)),
    "gemma2": uniform_decoder(
        "gemma2",
        **SHAPE,
        **GEMMA,
        windows=(32, 0),
        attn_softcap=50.0,
        logit_softcap=30.0,
        attn_scale=0.3,
    ),
    "gemma3": uniform_decoder(
        "gemma3", **SHAPE, **GEMMA, windows=(32, 0), qk_norm=True, local_rope=Rope(10_000.0)
    ),
    "qwen3_moe": uniform_decoder(
        "qwen3_moe", **SHAPE, E=8, top_k=3, F_expert=32, qk_norm=True, norm_topk=True
    ),
    "mixtral": uniform_decoder("mixtral", **SHAPE, E=4, top_k=2, F_expert=96),
    "gpt_oss": gpt_oss.from_hf(
        dict(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            vocab_size=512,
            max_position_embeddings=512,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=48,
            swiglu_limit=0.5,
        )
    ),
}
_GEMMA4 = dict(
    hidden_size=64,
    intermediate_size=96,
    vocab_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    max_position_embeddings=512,
    sliding_window=32,
)
FAMILIES |= {
    "gemma4": gemma4.from_hf(
        _GEMMA4
        | dict(
            num_hidden_layers=4,
            layer_types=[LOCAL, GLOBAL] * 2,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=512,
        )
    ),
    "gemma4_moe": gemma4.from_hf(
        _GEMMA4
        | dict(
            num_hidden_layers=2,
            layer_types=[LOCAL, GLOBAL],
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=32,
        )
    ),
}
# Gated DeltaNet, gated DeltaNet, attention: twice.
_BLOCK = FAMILIES["qwen3"].layers[0]
_DELTA = dataclasses.replace(_BLOCK, mixer=GatedDeltaNetConfig(K=2, N=4, D=16, V=16))
HYBRID = dataclasses.replace(
    FAMILIES["qwen3"], family="qwen3_5", layers=(_DELTA, _DELTA, _BLOCK) * 2, stacked=True
)
# Short convolution, short convolution, attention: twice.
_CONV = dataclasses.replace(_BLOCK, mixer=ShortConvConfig(N=4, H=16, bias=True))
SHORT_CONV = dataclasses.replace(
    FAMILIES["qwen3"], family="lfm2", layers=(_CONV, _CONV, _BLOCK) * 2, stacked=True
)
SMALL = RolloutConfig(
    max_num_seqs=8, max_num_batched_tokens=256, page_len=64, steps_per_dispatch=8, n_pages=32
)


def make_params(cfg: DecoderConfig, scale: float = 4.0):
    """Random weights, large enough that the distributions are far from uniform.

    Vectors, those of experts too, are moved from their defaults.
    """
    params = init_params(jax.random.key(1), decoder_specs(cfg), TRAIN, jnp.float32)
    noise = jax.random.key(2)
    return jax.tree.map_with_path(
        lambda path, w: (
            w * scale
            if w.ndim > 1 + cfg.stacked and ".bias" not in jax.tree_util.keystr(path)
            else w
            + jax.reshard(0.1 * jax.random.normal(noise, w.shape), jax.typeof(w).sharding.spec)
        ),
        params,
    )


def make_engine(
    cfg: DecoderConfig,
    rollout: RolloutConfig = SMALL,
    implementation: str | None = None,
    rules: Rules = DECODE,
    keep_support: bool = False,
    keep_experts: bool = False,
    filters: tuple[str, ...] = FILTERS,
    adjustable: bool = False,
    **changes,
) -> PagedEngine:
    return PagedEngine(
        cfg,
        dataclasses.replace(rollout, **changes),
        rules=rules,
        dtype=jnp.float32,
        max_len=256,
        eos_ids=(1,),
        implementation=implementation,
        keep_support=keep_support,
        keep_experts=keep_experts,
        filters=filters,
        adjustable=adjustable,
    )


def make_requests(n: int = 6, *, n_samples: int = 2, seed: int = 0, V: int = 512, **kw):
    """`n` requests, prompts of 3..150 tokens with `n_samples` samples each."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, V, int(rng.integers(3, 150)), dtype=np.int32) for _ in range(n)]
    kw = {"max_tokens": 20, "sampling": SamplingConfig()} | kw
    return [
        Request(
            tokens=prompts[i // n_samples], prompt_id=i // n_samples, sample=i % n_samples, **kw
        )
        for i in range(n)
    ]


def run(engine: PagedEngine, params, requests) -> list[tuple[list[int], list[float], str]]:
    """(tokens, logps, finish) of every request."""
    return [
        (tokens, logps, end)
        for tokens, logps, _, end in run_with_behavior(engine, params, requests)
    ]


def run_with_behavior(engine: PagedEngine, params, requests):
    """(tokens, logps, behavior logps, finish) of every request."""
    slots = [engine.submit(r) for r in requests]
    out = {slot: ([], [], [], "") for slot in slots}
    for _ in range(10_000):
        if not engine.n_unfinished:
            break
        for made in engine.generate(params):
            tokens, logps, behavior, _ = out[made.slot]
            tokens, logps = tokens + made.tokens.tolist(), logps + made.logp.tolist()
            behavior = behavior + made.behavior_logp.tolist()
            out[made.slot] = tokens, logps, behavior, made.finish
    assert not engine.n_unfinished
    return [out[slot] for slot in slots]


def limit_pages(engine: PagedEngine, n_pages: int) -> list[int]:
    """Allocates pages so that only `n_pages` are left for sequences. Returns the allocated ones."""
    pool = engine.scheduler.pool
    return pool.allocate(pool.n_free - n_pages)


def run_one_by_one(
    engine: PagedEngine, params, requests
) -> list[tuple[list[int], list[float], str]]:
    """As `run`, but each request arrives while the ones before it decode."""
    waiting, made, slots = list(requests), {}, []
    while waiting or engine.n_unfinished:
        if waiting:
            slots.append(engine.submit(waiting.pop(0)))
            made[slots[-1]] = ([], [], "")
        for out in engine.generate(params):
            tokens, logps, _ = made[out.slot]
            made[out.slot] = tokens + out.tokens.tolist(), logps + out.logp.tolist(), out.finish
    return [made[slot] for slot in slots]


def record_dispatches(engine: PagedEngine) -> set[Dispatch]:
    """The programs that the engine runs from now on."""
    runner, found = engine.runner, set()

    def record(kind: str, bucket: Callable[[tuple], int]) -> None:
        run = getattr(runner, kind)

        def recorded(*args, **options):
            variant = [arg for arg in args if isinstance(arg, Variant)]
            found.add(Dispatch(kind, bucket(args), *variant))
            return run(*args, **options)

        setattr(runner, kind, recorded)

    for kind in COPIES:
        record(kind, lambda args: COPIES_PER_CALL)
    for kind in ("prefill", "decode"):
        record(kind, lambda args: args[2])
    record("mixed", lambda args: runner.shapes.prefill_buckets[-1])
    return found


def has_mixed(dispatched: set[Dispatch]) -> bool:
    """Whether one of them is mixed: prefill with a decode step."""
    return any(kind == "mixed" for kind, *_ in dispatched)


def trainer_logps(cfg: DecoderConfig, params, requests, results, temperature: float = 1.0):
    """The trainer's logprobs of the sampled tokens, with one sequence per packed row."""
    T = 256
    tokens = np.zeros((len(requests), T), np.int32)
    targets, segments = tokens.copy(), tokens.copy()
    for b, (request, (made, _, _)) in enumerate(zip(requests, results, strict=True)):
        row = np.concatenate([request.tokens, made])
        tokens[b, : len(row) - 1], targets[b, : len(row) - 1] = row[:-1], row[1:]
        segments[b, : len(row) - 1] = 1
    positions = np.tile(np.arange(T, dtype=np.int32), (len(requests), 1))

    @jax.jit
    def score(params, tokens, targets, segments, positions):
        hidden = forward_packed(params, tokens, segments, positions, rules=TRAIN)
        return token_scores(
            hidden,
            params.unembed,
            targets,
            change=params.head_change(hidden, TRAIN),
            temperature=temperature,
            logit_softcap=cfg.logit_softcap,
            chunk=256,
            rules=TRAIN,
        )[0]

    spec = TRAIN.spec("batch", "time")
    rows = [jax.device_put(a, spec) for a in (tokens, targets, segments, positions)]
    logp = np.asarray(score(params, *rows))
    starts = [len(r.tokens) - 1 for r in requests]
    return [
        logp[b, s : s + len(out[0])] for b, (s, out) in enumerate(zip(starts, results, strict=True))
    ]

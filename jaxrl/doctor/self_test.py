"""The self-test: every kernel against its reference, and one tiny step against stored numbers."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.check_model import LoadedModel, check_engine
from jaxrl.config.keys import (
    AlgorithmConfig,
    LearnerConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from jaxrl.data.packing import pack
from jaxrl.doctor.finding import Finding
from jaxrl.doctor.operations import REFERENCE, VALUE_TOLERANCE, Operation
from jaxrl.engine.api import Request
from jaxrl.engine.engine import PagedEngine
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.state import init_state
from jaxrl.learner.step import make_update
from jaxrl.models.config import DecoderConfig, uniform_decoder
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.spec import init_params
from jaxrl.types import TrainingSample
from sharding import DECODE, TRAIN, make_mesh

SECTION = "self-test"
MODEL = uniform_decoder("qwen3", L=2, D=256, N=2, K=1, H=128, F=512, V=512, qk_norm=True)
ROW_LEN, N_SAMPLES = 128, 16
LOGP_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
# Of the step below in float32 on CPU, and the part by which bfloat16 may differ.
EXPECTED = {
    "loss/total": -0.75196,
    "loss/entropy": 5.43790,
    "loss/approx_kl": 0.93801,
    "optim/grad_norm": 2.33800,
}
STEP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}


def kernel_findings(operation: Operation, platform: str) -> Iterator[Finding]:
    """A row per implementation that runs on the attached devices."""
    allowed, expected = VALUE_TOLERANCE[platform], operation.compute(REFERENCE)
    for name in operation.implementations:
        title = f"{operation.name}: {name}"
        try:
            error = operation.error(name, expected)
        except Exception as problem:  # of a compiler or driver: it is what the table reports
            yield Finding(SECTION, title, first_line(problem), "failed")
            continue
        text = f"largest error {error:.1e} of the largest number, {allowed:.1e} allowed"
        yield Finding(SECTION, title, text, "ok" if error <= allowed else "failed")


def first_line(problem: Exception) -> str:
    text = str(problem).strip() or type(problem).__name__
    return f"{type(problem).__name__}: {text.splitlines()[0][:300]}"


def step_findings(platform: str) -> Iterator[Finding]:
    """A rollout of a tiny model on one device, and an update of it on all."""
    dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    try:
        with jax.set_mesh(make_mesh()):
            model = LoadedModel(Path(), MODEL, tiny_params(MODEL, dtype))
            for row in check_engine(model, 0, LOGP_TOLERANCE[dtype.name]):
                yield Finding(SECTION, f"rollout: {row.name}", row.text, _status(bool(row.passed)))
        yield update_finding(dtype)
        if platform == "gpu":  # last: a driver that cannot do it may end the process
            yield graph_finding(dtype)
    except Exception as problem:  # of a compiler or driver: it is what the table reports
        yield Finding(SECTION, "step", first_line(problem), "failed")


def graph_finding(dtype: jnp.dtype) -> Finding:
    """Decoding with rollout.cuda_graph, twice, against decoding without."""
    plain, graph = (sampled_tokens(dtype, cuda_graph=on) for on in (False, True))
    n_steps = sum(map(len, plain[0]))
    equal = all(run == plain[0] for run in (*plain, *graph))
    text = f"two runs of {n_steps} tokens are {'equal to' if equal else 'other than'} those without"
    return Finding(SECTION, "rollout.cuda_graph", text, _status(equal))


def sampled_tokens(dtype: jnp.dtype, *, cuda_graph: bool) -> list[list[list[int]]]:
    """The responses of the tiny model to a few prompts, in two runs of one engine."""
    rollout = RolloutConfig(max_num_seqs=8, steps_per_dispatch=8, cuda_graph=cuda_graph)
    with jax.set_mesh(make_mesh()):
        params = tiny_params(MODEL, dtype)
        engine = PagedEngine(MODEL, rollout, rules=DECODE, dtype=dtype, max_len=128)
        return [_responses(engine, params) for _ in range(2)]


def _responses(engine: PagedEngine, params: Decoder) -> list[list[int]]:
    prompts = [sample.prompt_tokens for sample in samples()[: engine.rollout.max_num_seqs]]
    slots = [
        engine.submit(Request(tokens=prompt, max_tokens=40, sampling=SamplingConfig(), prompt_id=i))
        for i, prompt in enumerate(prompts)
    ]
    responses: dict[int, list[int]] = {slot: [] for slot in slots}
    while engine.n_unfinished:
        for made in engine.generate(params):
            responses[made.slot] += made.tokens.tolist()
    return [responses[slot] for slot in slots]


def _status(passed: bool) -> str:
    return "ok" if passed else "failed"


def tiny_params(cfg: DecoderConfig, dtype: jnp.dtype) -> Decoder:
    """Random weights, the same on every mesh and platform but for rounding."""
    params = init_params(jax.random.key(0), decoder_specs(cfg), TRAIN, dtype)
    return jax.tree.map(lambda p: p * 4 if p.ndim > 1 else p, params)  # logits that differ


def samples() -> list[TrainingSample]:
    """Responses of random tokens. Advantages have one sign, so that the loss is far from zero."""
    rng = np.random.default_rng(0)

    def one(i: int) -> TrainingSample:
        prompt_len, response_len = rng.integers(4, 30), rng.integers(8, 60)
        tokens = rng.integers(0, MODEL.V, prompt_len + response_len).astype(np.int32)
        logp = -np.log(MODEL.V) + 0.1 * rng.standard_normal(response_len)
        return TrainingSample(
            prompt_tokens=tokens[:prompt_len],
            tokens=tokens[prompt_len:],
            loss_mask=np.ones(response_len, bool),
            rollout_logp=logp.astype(np.float32),
            prompt_id=i,
            advantages=np.full(response_len, 0.5 + i % 3, np.float32),
        )

    return [one(i) for i in range(N_SAMPLES)]


def update_finding(dtype: jnp.dtype) -> Finding:
    """One update on all attached devices, by its metrics."""
    found = update_metrics(dtype)
    allowed = STEP_TOLERANCE[dtype.name]
    errors = {name: abs(found[name] - want) / abs(want) for name, want in EXPECTED.items()}
    parts = [f"{name} {found[name]:.4f} of {want:.4f}" for name, want in EXPECTED.items()]
    worst = float(np.max([*errors.values()]))
    text = f"{', '.join(parts)}; largest difference {worst:.1e}, {allowed:.0e} allowed"
    name = f"update on {jax.local_device_count()} devices in {dtype.name}"
    return Finding(SECTION, name, text, _status(worst <= allowed))


def update_metrics(dtype: jnp.dtype) -> dict[str, float]:
    """The metrics of one update of the tiny model, sharded over all devices."""
    cfg = RunConfig(
        algorithm=AlgorithmConfig(aggregation="token_mean", old_logp="rollout"),
        learner=LearnerConfig(token_budget=2 * ROW_LEN, logprob_chunk=64, remat="none"),
    )
    with jax.set_mesh(make_mesh(fsdp=-1)):
        params = tiny_params(MODEL, dtype)
        optimizer = make_optimizer(cfg.learner, 1, decoder_specs(MODEL))
        n_ranks = TRAIN.n_shards("batch")
        packed = pack(samples(), shapes=((2, ROW_LEN),), align=8, n_ranks=n_ranks)
        update = make_update(cfg, optimizer, TRAIN)
        state = init_state(params, optimizer)
        return update.update(state, [one.batch for one in packed])[1]

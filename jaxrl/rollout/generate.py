"""Single-turn generation: prompts to rollouts, through any engine."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.support import join
from jaxrl.engine.api import EngineStats, Generated, Request, RequestEngine
from jaxrl.rewards.arguments import Decode
from jaxrl.types import Prompt, Rollout, TokenSets, Tree

# (tokens generated, responses finished, responses in total)
OnProgress = Callable[[int, int, int], None]


@dataclasses.dataclass
class Response:
    """A response that is being generated."""

    prompt: Prompt
    sample: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    behavior_logp: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # policy version of each token
    support: list[TokenSets] = dataclasses.field(default_factory=list)  # per dispatch
    finish: str = ""


def generate(
    engine: RequestEngine,
    params: Tree,
    prompts: Sequence[Prompt],
    *,
    n: int,
    sampling: SamplingConfig,
    max_tokens: int | Sequence[int],
    seed: int,
    version: int,
    decode: Decode,
    on_progress: OnProgress | None = None,
    ignore_stop: bool = False,
) -> tuple[list[Rollout], dict[str, float]]:
    """`n` rollouts per prompt, ordered by prompt, then sample, and the rollout/* metrics.

    `max_tokens` is one number or one per response, in that order; with `ignore_stop` it is the
    length of every response. `on_progress` is called after each dispatch. Raises ValueError if a
    request can never fit the engine.
    """
    start = time.perf_counter()
    engine.take_stats()
    engine.set_version(version)
    responses = [Response(prompt, i) for prompt in prompts for i in range(n)]
    lens = [max_tokens] * len(responses) if isinstance(max_tokens, int) else list(max_tokens)
    if len(lens) != len(responses):
        raise ValueError(f"max_tokens has {len(lens)} numbers for {len(responses)} responses")
    by_slot: dict[int, Response] = {}
    try:
        for response, length in zip(responses, lens, strict=True):
            request = Request(
                tokens=response.prompt.tokens,
                max_tokens=length,
                sampling=sampling,
                prompt_id=response.prompt.id,
                sample=response.sample,
                seed=seed,
                ignore_stop=ignore_stop,
            )
            by_slot[engine.submit(request)] = response
        _run(engine, params, by_slot, sampling.stop, decode, on_progress)
    except BaseException:
        for slot in by_slot:
            with contextlib.suppress(KeyError):  # already ended
                engine.free(slot)
        raise
    rollouts = [to_rollout(response, decode) for response in responses]
    n_kept = sum(len(r.tokens) for r in rollouts)
    return rollouts, engine_metrics(engine.take_stats(), n_kept, time.perf_counter() - start)


def _run(
    engine: RequestEngine,
    params: Tree,
    by_slot: dict[int, Response],
    stop: tuple[str, ...],
    decode: Decode,
    on_progress: OnProgress | None,
) -> None:
    """Runs the engine until all responses have finished."""
    unfinished = dict(by_slot)
    n_tokens = 0
    while unfinished:
        for generated in engine.generate(params):
            response = unfinished[generated.slot]
            n_tokens += len(generated.tokens)
            append_generated(response, generated, stop, decode)
            if response.finish:
                del unfinished[generated.slot]
                if not generated.finish:
                    engine.free(generated.slot)
        if on_progress is not None:
            on_progress(n_tokens, len(by_slot) - len(unfinished), len(by_slot))


def to_rollout(response: Response, decode: Decode) -> Rollout:
    """The rollout of a finished response."""
    tokens = np.array(response.tokens, np.int32)
    return Rollout(
        prompt=response.prompt,
        sample=response.sample,
        tokens=tokens,
        logp=np.array(response.logp, np.float32),
        behavior_logp=np.array(response.behavior_logp, np.float32),
        support=join(response.support, len(tokens)) if response.support else None,
        loss_mask=np.ones(len(tokens), bool),
        versions=np.array(response.versions, np.int32),
        finish=response.finish,
        text=decode(tokens),
    )


def append_generated(
    response: Response, generated: Generated, stop: tuple[str, ...], decode: Decode
) -> None:
    """Appends the tokens of one dispatch, up to the token that completes a stop string."""
    n_old = len(response.tokens)
    response.tokens += generated.tokens.tolist()
    response.logp += generated.logp.tolist()
    response.behavior_logp += generated.behavior_logp.tolist()
    response.versions += [generated.version] * len(generated.tokens)
    if generated.support is not None:
        response.support.append(generated.support)
    response.finish = generated.finish
    end = stop_string_end(response.tokens, n_old, stop, decode) if stop else None
    if end is not None:
        del response.tokens[end:], response.logp[end:], response.behavior_logp[end:]
        del response.versions[end:]
        response.finish = "stop"


def continued(request: Request, sampled: Sequence[int]) -> Request:
    """The request for the rest of a response, after the tokens that it has."""
    if not sampled:
        return request
    tokens = np.concatenate([request.tokens, np.array(sampled, np.int32)])
    return dataclasses.replace(request, tokens=tokens, max_tokens=request.max_tokens - len(sampled))


def stop_string_end(
    tokens: Sequence[int], n_old: int, stop: tuple[str, ...], decode: Decode
) -> int | None:
    """The number of tokens whose text first contains a stop string, None if there is none.

    The first `n_old` tokens are known to contain none.
    """
    # A string that ends after n_old starts at most its length in bytes, as tokens, before it.
    first = max(n_old - max(len(s.encode()) for s in stop), 0)

    def stops(end: int) -> bool:
        text = decode(np.asarray(tokens[first:end], np.int32))
        return any(s in text for s in stop)

    if not stops(len(tokens)):
        return None
    return next(end for end in range(n_old + 1, len(tokens) + 1) if stops(end))


def engine_metrics(stats: EngineStats, n_tokens: int, wall_s: float) -> dict[str, float]:
    """The rollout/* metrics of one call, averaged over its decode steps.

    `n_tokens` counts the tokens of finished responses, `wall_s` is the wall time of the call.
    """
    steps = max(stats.n_steps, 1)
    n_prompt_tokens = stats.n_prefill_tokens + stats.n_cached_tokens
    return {
        "rollout/tokens_per_s": n_tokens / max(wall_s, 1e-9),
        "rollout/cache_utilization": stats.cache_used / steps,
        "rollout/cache_utilization_max": stats.cache_used_max,
        "rollout/running": stats.running / steps,
        "rollout/waiting": stats.waiting / steps,
        "rollout/preempted": float(stats.n_preempted),
        "rollout/prefill_tokens": float(stats.n_prefill_tokens),
        "rollout/shared_tokens": float(stats.n_cached_tokens),
        "rollout/prefix_hit_rate": stats.n_cached_tokens / max(n_prompt_tokens, 1),
        "rollout/padding_fraction": 1.0
        - (stats.n_tokens - stats.n_accepted_tokens) / max(stats.n_batch_slots, 1),
        "rollout/draft_acceptance": stats.n_accepted_tokens / max(stats.n_draft_tokens, 1),
        "rollout/host_fraction": stats.host_s / max(stats.host_s + stats.device_s, 1e-9),
    }

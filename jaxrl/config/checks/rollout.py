"""Rules between the keys of what generates and evaluates: engine, layout, samples of validation."""

from jaxrl.config.keys import ENVIRONMENTS, FULL_KLS, RoleConfig, RunConfig
from jaxrl.config.schema import nearest, to_dict

PAGE_ALIGN = 64  # KV pages of a multiple of this many tokens give the engine the trainer's logprobs bit for bit


def sampling_problems(run: RunConfig) -> list[str]:
    """A line for every rule that the run breaks, with the values and what to set instead."""
    return [*_page_problems(run), *_layout_problems(run), *_eval_problems(run), *_env_problems(run)]


def _page_problems(run: RunConfig) -> list[str]:
    problems, rollout = [], run.rollout
    if rollout.page_len % PAGE_ALIGN:
        problems.append(
            f"rollout.page_len={rollout.page_len} is no multiple of {PAGE_ALIGN}, which the engine needs to give the "
            f"trainer's logprobs exactly; set {-(-rollout.page_len // PAGE_ALIGN) * PAGE_ALIGN}"
        )
    if rollout.max_num_batched_tokens < rollout.page_len:
        problems.append(
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than one page; "
            f"set at least rollout.page_len={rollout.page_len}"
        )
    longest = -(-run.data.max_len // max(rollout.page_len, 1))
    if 0 < rollout.n_pages < longest:
        problems.append(
            f"rollout.n_pages={rollout.n_pages} cannot hold one sequence of {run.data.max_len} tokens; set at least "
            f"{longest} (rollout.page_len={rollout.page_len}), or 0 to size the pool from memory"
        )
    return problems


def _layout_problems(run: RunConfig) -> list[str]:
    rollout, algorithm = run.rollout, run.algorithm
    problems = [
        f"rollout.{name}={size} is of an engine's replica, but rollout.layout='training' has none; set "
        f"rollout.layout='replicas', or rollout.{name}=0"
        for name, size in (("tensor", rollout.tensor), ("expert", rollout.expert))
        if size and rollout.layout == "training"
    ]
    if run.ref != RoleConfig() and algorithm.kl_coef and algorithm.kl in FULL_KLS:
        sizes = ", ".join(f"ref.{name}={size}" for name, size in to_dict(run.ref).items() if size)
        problems.append(
            f"{sizes} lays the reference out by itself, but algorithm.kl={algorithm.kl!r} runs it inside the update; "
            f"leave these keys at 0, or set an algorithm.kl of sampled tokens such as 'k3'"
        )
    return problems


def _eval_problems(run: RunConfig) -> list[str]:
    problems, evaluation = [], run.eval
    if evaluation.n > 1 and evaluation.sampling.temperature == 0:
        problems.append(
            f"eval.n={evaluation.n} greedy samples of a prompt are all equal; set eval.n=1, or "
            f"eval.sampling.temperature above 0"
        )
    if too_large := [k for k in evaluation.k if k > evaluation.n]:
        problems.append(
            f"eval.k={evaluation.k} asks for pass@{max(too_large)}, but eval.n={evaluation.n} is all that is sampled "
            f"of a prompt; set eval.n to at least {max(too_large)}, or a smaller eval.k"
        )
    return problems


def _env_problems(run: RunConfig) -> list[str]:
    problems, env = [], run.env
    name = env.name.partition("?")[0]
    if name and ":" not in name and name not in ENVIRONMENTS:
        guess = nearest(name, ENVIRONMENTS)
        hint = f"did you mean {guess!r}? " if guess else ""
        problems.append(
            f"env.name={env.name!r} is not known; {hint}set one of {', '.join(ENVIRONMENTS)}, or "
            "'package.module:Class'"
        )
    counts = "environment" in run.reward.functions
    if name and not counts:
        problems.append(
            f"env.name={env.name!r} gives rewards that reward.functions={run.reward.functions} leaves out; add "
            "'environment' to reward.functions, with the weight 0 where it should not count"
        )
    if counts and not name:
        problems.append(
            "reward.functions has 'environment', but env.name is empty; set env.name, or other functions"
        )
    return problems

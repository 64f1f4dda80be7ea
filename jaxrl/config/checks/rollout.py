"""Rules between the keys of the engine, sampling, validation and environments."""

from jaxrl.config.agent_command import command_words
from jaxrl.config.choices import AGENTS, ENVIRONMENTS, FULL_KLS
from jaxrl.config.keys import RunConfig, ScoringConfig
from jaxrl.config.schema import did_you_mean, is_import_path, to_dict

PAGE_ALIGN = 64  # tokens; with multiples of it, engine and trainer logprobs are bitwise equal


def rollout_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    errors = [*_page_errors(run), *_layout_errors(run), *_eval_errors(run), *_env_errors(run)]
    return [*errors, *_rendered_errors(run)]


def training_sampling_errors(run: RunConfig) -> list[str]:
    """Sampling settings that make the samples of a group equal, or a mask without a filter."""
    errors, sampling = [], run.rollout.sampling
    if sampling.temperature == 0:
        errors.append(
            "rollout.sampling.temperature=0 makes the samples of a group equal, so there is no "
            "gradient; set it above 0"
        )
    if sampling.top_k == 1:
        errors.append(
            "rollout.sampling.top_k=1 makes the samples of a group equal, so there is no gradient; "
            "set 0 for the whole vocabulary"
        )
    if run.algorithm.keep_sampling_mask and not sampling.filters:
        errors.append(
            "algorithm.keep_sampling_mask=True keeps the tokens that rollout.sampling.top_k, top_p "
            "or min_p leave, but none of them is set; set for example rollout.sampling.top_p=0.95, "
            "or algorithm.keep_sampling_mask=False"
        )
    return errors


def rollout_warnings(run: RunConfig) -> list[str]:
    """Truncated sampling that the update treats as on-policy."""
    algorithm, filters = run.algorithm, run.rollout.sampling.filters
    known = algorithm.correction != "none" or algorithm.old_logp == "rollout"
    if not filters or known or algorithm.keep_sampling_mask:
        return []
    shown = " and ".join(f"rollout.sampling.{name}={value}" for name, value in filters.items())
    return [
        f"{shown} truncates the sampling distribution, but algorithm.correction='none' treats the "
        "samples as those of the full one: the gradient is biased; leave it off for training, or "
        "set algorithm.keep_sampling_mask=True or algorithm.correction='token_tis'"
    ]


def _page_errors(run: RunConfig) -> list[str]:
    errors, rollout = [], run.rollout
    if rollout.page_len % PAGE_ALIGN:
        errors.append(
            f"rollout.page_len={rollout.page_len} is not a multiple of {PAGE_ALIGN}, which the "
            "engine needs for the same logprobs as the trainer; set "
            f"{-(-rollout.page_len // PAGE_ALIGN) * PAGE_ALIGN}"
        )
    if rollout.max_num_batched_tokens < rollout.page_len:
        errors.append(
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than one "
            f"page; set at least rollout.page_len={rollout.page_len}"
        )
    needed = -(-run.engine_len // max(rollout.page_len, 1))
    if 0 < rollout.n_pages < needed:
        errors.append(
            f"rollout.n_pages={rollout.n_pages} cannot hold one sequence of {run.engine_len} "
            f"tokens; set at least {needed} (rollout.page_len={rollout.page_len}), or 0 to size "
            "the pool from memory"
        )
    return errors


def _layout_errors(run: RunConfig) -> list[str]:
    rollout, algorithm = run.rollout, run.algorithm
    errors = [
        f"rollout.{name}={size} sets the size of a replica, but rollout.layout='training' has "
        f"none; set rollout.layout='replicas', or rollout.{name}=0"
        for name, size in (("tensor", rollout.tensor), ("expert", rollout.expert))
        if size and rollout.layout == "training"
    ]
    if run.ref != ScoringConfig() and algorithm.has_kl and algorithm.kl in FULL_KLS:
        sizes = ", ".join(f"ref.{name}={size}" for name, size in to_dict(run.ref).items() if size)
        errors.append(
            f"{sizes} gives the reference another mesh or token budget, but "
            f"algorithm.kl={algorithm.kl!r} runs it inside the update; leave these "
            "keys at 0, or set an algorithm.kl of sampled tokens "
            "such as 'k3'"
        )
    return errors


def _eval_errors(run: RunConfig) -> list[str]:
    errors, evaluation = [], run.eval
    if evaluation.n > 1 and evaluation.sampling.temperature == 0:
        errors.append(
            f"eval.n={evaluation.n} greedy samples of a prompt are all equal; set eval.n=1, or "
            "eval.sampling.temperature above 0"
        )
    if too_large := [k for k in evaluation.k if k > evaluation.n]:
        errors.append(
            f"eval.k={evaluation.k} includes pass@{max(too_large)}, but only eval.n={evaluation.n} "
            f"samples per prompt are drawn; set eval.n to at least {max(too_large)}, or a smaller "
            "eval.k"
        )
    return errors


def _env_errors(run: RunConfig) -> list[str]:
    errors, env = [], run.env
    name = env.name.partition("?")[0]
    if name and not is_import_path(name) and name not in ENVIRONMENTS:
        hint = did_you_mean(name, ENVIRONMENTS)
        errors.append(
            f"env.name={env.name!r} is not known; {hint}set one of {', '.join(ENVIRONMENTS)}, or "
            "'package.module:Class'"
        )
    agent = env.agent.partition("?")[0]
    if agent and not is_import_path(agent) and agent not in AGENTS:
        errors.append(
            f"env.agent={env.agent!r} is no function; set 'path/to/file.py:function', "
            f"'package.module:function' or one of {', '.join(AGENTS)}"
        )
    given = [f"{key}={value!r}" for key, value in env.kinds.items() if value]
    if len(given) > 1:
        errors.append(
            f"{' and '.join(given)} are {len(given)} kinds of episodes; set one of them alone"
        )
    if env.command:
        errors += _command_errors(env.command)
    if env.episode_timeout_s and not env.program:
        errors.append(
            f"env.episode_timeout_s={env.episode_timeout_s:g} limits episodes of an agent, but "
            "env.agent, env.command and env.verifiers are empty; set one of them, or "
            "env.episode_timeout_s=0"
        )
    is_scored = "environment" in run.reward.functions
    if given and (env.name or env.verifiers or agent in AGENTS) and not is_scored:
        errors.append(
            f"{given[0]} returns rewards, but reward.functions={run.reward.functions} "
            "ignores them; add 'environment' to reward.functions, with the weight 0 if it should "
            "not count"
        )
    if is_scored and not env.episodes:
        errors.append(
            f"reward.functions has 'environment', but {', '.join(env.kinds)} are empty; set one of "
            "them, or other functions"
        )
    return errors


def _command_errors(command: str) -> list[str]:
    try:
        command_words(command)
    except ValueError as error:
        return [str(error)]
    return []


def _rendered_errors(run: RunConfig) -> list[str]:
    """Readers of messages that would render a rendered prompt again."""
    env = run.env
    readers = env.kinds | {"reward_model.path": run.reward_model.path}
    return [
        f"data.rendered_prompts=True leaves no messages, which {key}={value!r} renders; set it to "
        "False and use prompts of messages"
        for key, value in readers.items()
        if value and run.data.rendered_prompts
    ]

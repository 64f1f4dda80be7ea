"""Rules between mini-batches, token budgets, row lengths and sequence lengths."""

from jaxrl.config.choices import ONE_RANGE
from jaxrl.config.keys import LearnerConfig, RunConfig


def batch_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    errors = _mini_batch_errors(run) + _length_errors(run, run.learner, "learner")
    errors += _prefix_lines(run, "on", "set shared_prefixes to 'auto' or 'off'")
    if run.critic.token_budget:
        errors += _length_errors(run, run.critic_run.learner, "critic")
    if run.reward_model.token_budget:
        errors += reward_model_length_errors(run)
    return errors


def batch_warnings(run: RunConfig) -> list[str]:
    """Common prefixes that are computed for every sequence, though the config asks for sharing."""
    return _prefix_lines(run, "auto", "prefixes are not shared; set shared_prefixes='off'")


def _prefix_lines(run: RunConfig, wanted: str, remedy: str) -> list[str]:
    """A line if shared_prefixes is `wanted`, but not supported by the named attention kernel."""
    kernel = run.model.attention
    if run.learner.shared_prefixes != wanted or kernel not in ONE_RANGE:
        return []
    return [
        f"learner.shared_prefixes={wanted!r}, but a query of the attention kernel {kernel!r} "
        f"sees one range of keys; {remedy}, or model.attention='auto'"
    ]


def reward_model_length_errors(run: RunConfig) -> list[str]:
    section = "reward_model" if run.reward_model.token_budget else "learner"
    return _length_errors(run, run.reward_model_run.learner, section)


def _mini_batch_errors(run: RunConfig) -> list[str]:
    data, learner = run.data, run.learner
    if not _divides(run.mini_batch_prompts, data.prompts_per_step):
        divisors = [
            d for d in range(1, data.prompts_per_step + 1) if data.prompts_per_step % d == 0
        ]
        near = min(divisors, key=lambda d: abs(d - run.mini_batch_prompts), default=1)
        return [
            f"learner.mini_batch_prompts={learner.mini_batch_prompts} does not divide "
            f"data.prompts_per_step={data.prompts_per_step}; set a divisor such as {near}, or 0 "
            "for one update"
        ]
    total_updates = run.total_steps * run.updates_per_step
    if 0 < total_updates < learner.warmup_steps:
        return [
            f"learner.warmup_steps={learner.warmup_steps} is more than the {total_updates} "
            f"optimizer steps of total_steps={run.total_steps} ({run.updates_per_step} per step); "
            f"set at most {total_updates}"
        ]
    return []


def _length_errors(run: RunConfig, learner: LearnerConfig, section: str) -> list[str]:
    errors, data, budget = [], run.data, f"{section}.token_budget"
    align, rows = learner.segment_align, learner.row_lens
    source = "learner.buckets" if learner.buckets else budget
    if list(rows) != sorted(set(rows)) or not all(_divides(align, row) for row in rows):
        up = sorted({-(-row // max(align, 1)) * align for row in rows})
        errors.append(
            f"{source}={one_or_all(rows)} must be ascending multiples of "
            f"learner.segment_align={align}; set {one_or_all(tuple(up))}"
        )
    if max(rows) > learner.token_budget:
        errors.append(
            f"learner.buckets={one_or_all(rows)} has rows longer than "
            f"{budget}={learner.token_budget}; set {budget} to at least {max(rows)} or drop those "
            "buckets"
        )
    if data.max_len > max(rows):
        needed = -(-data.max_len // max(align, 1)) * align
        errors.append(
            f"data.max_prompt_len={data.max_prompt_len} + "
            f"data.max_response_len={data.max_response_len} = {data.max_len} tokens do not fit the "
            f"longest row, {source}={one_or_all(rows)}; allow rows of {needed}, or shorten the "
            "prompts or responses"
        )
    return errors


def one_or_all(row_lens: tuple[int, ...]) -> str:
    """The row lengths as text: the number alone if there is only one."""
    return str(row_lens[0]) if len(row_lens) == 1 else str(row_lens)


def _divides(divisor: int, value: int) -> bool:
    return divisor > 0 and value % divisor == 0

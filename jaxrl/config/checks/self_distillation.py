"""Rules between the keys of self-distillation and the others."""

import dataclasses

from jaxrl.config.keys import RunConfig, SelfDistillationConfig

# The keys that belong to one context each.
OF_CONTEXT = {
    "demonstration": ("demonstration", "demonstration_template"),
    "solution": ("own_solution", "remove_thinking", "solution_template"),
    "feedback": ("feedback_with_solution", "feedback_template"),
}


def self_distillation_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    settings = run.self_distillation
    if not settings.context:
        return [
            f"self_distillation.{name}={getattr(settings, name)!r} has no effect with "
            "self_distillation.context=(); set what the teacher reads, such as 'solution', or "
            "leave the key out"
            for name in _changed(settings)
        ]
    return [
        *_context_errors(run),
        *_template_errors(settings),
        *_teacher_errors(run),
        *_prompt_errors(run),
        *_length_errors(run),
    ]


def _changed(settings: SelfDistillationConfig) -> list[str]:
    default = SelfDistillationConfig()
    names = (field.name for field in dataclasses.fields(settings) if field.name != "context")
    return [name for name in names if getattr(settings, name) != getattr(default, name)]


def _context_errors(run: RunConfig) -> list[str]:
    settings, errors = run.self_distillation, []
    context = settings.context
    if len(set(context)) < len(context):
        errors.append(f"self_distillation.context={context} names a text twice; name it once")
    for owner, keys in OF_CONTEXT.items():
        errors += [
            f"self_distillation.{name}={getattr(settings, name)!r} has no effect with "
            f"self_distillation.context={context}; add {owner!r}, or leave the key out"
            for name in _changed(settings)
            if name in keys and owner not in context
        ]
    if "solution" in context and run.rollout.n == 1 and not settings.own_solution:
        errors.append(
            "self_distillation.context with 'solution' shows other responses to the prompt, but "
            "rollout.n=1 gives none; set rollout.n to 2 or more, or context='demonstration'"
        )
    return errors


def _template_errors(settings: SelfDistillationConfig) -> list[str]:
    places = {
        "template": ("prompt", "context"),
        **{f"{name}_template": (name,) for name in OF_CONTEXT if name in settings.context},
    }
    return [
        f"self_distillation.{key}={getattr(settings, key)!r} has no place {{{place}}}; add it"
        for key, names in places.items()
        for place in names
        if f"{{{place}}}" not in getattr(settings, key)
    ]


def _teacher_errors(run: RunConfig) -> list[str]:
    algorithm, errors = run.algorithm, []
    if not algorithm.has_kl:
        errors.append(
            f"self_distillation.context={run.self_distillation.context} has no weight with "
            "algorithm.kl_coef=0; set algorithm.kl_coef (1.0 with algorithm.advantage='distill')"
        )
    if algorithm.kl_in == "loss" and not algorithm.kl_top_k:
        errors.append(
            f"algorithm.kl={algorithm.kl!r} in the loss reads the reference after the policy's "
            f"prompt, but self_distillation.context={run.self_distillation.context} gives it "
            "another one; set algorithm.kl_top_k=100 with algorithm.kl='jsd', or "
            "algorithm.kl_in='reward' with algorithm.kl='k1'"
        )
    if run.self_distillation.teacher == "policy" and algorithm.kl_top_k:
        errors.append(
            f"algorithm.kl_top_k={algorithm.kl_top_k} is scored by a reference model; set "
            "self_distillation.teacher='reference', with algorithm.ref_refresh_every=1 for the "
            "policy at the start of each step"
        )
    if run.self_distillation.teacher == "policy":
        others = {"teacher": "", "ref_refresh_every": 0}
        errors += [
            f"algorithm.{name}={getattr(algorithm, name)!r} sets a reference model, but with "
            "self_distillation.teacher='policy' there is none; leave it out, or set "
            "self_distillation.teacher='reference'"
            for name, neutral in others.items()
            if getattr(algorithm, name) != neutral
        ]
    return errors


def _prompt_errors(run: RunConfig) -> list[str]:
    """Prompts whose text the teacher's cannot be made of."""
    unsupported = {
        "env.name, env.agent or env.command": run.env.episodes,
        "data.images=True": run.data.images,
        "data.rendered_prompts=True": run.data.rendered_prompts,
    }
    return [
        f"self_distillation.context writes a text into the message of a prompt that is answered "
        f"once, and {setting} has other prompts; leave it out, or set self_distillation.context=()"
        for setting, holds in unsupported.items()
        if holds
    ]


def _length_errors(run: RunConfig) -> list[str]:
    data, longest = run.data, max(run.learner.row_lens)
    key = f"self_distillation.max_prompt_len={run.self_distillation.max_prompt_len}"
    source = "learner.buckets" if run.learner.buckets else "learner.token_budget"
    if run.max_teacher_prompt_len + data.max_response_len > longest:
        return [
            f"{key} + data.max_response_len={data.max_response_len} tokens do not fit the longest "
            f"row of {longest}; allow longer rows with {source}, or lower it"
        ]
    if run.max_teacher_prompt_len <= data.max_prompt_len:
        return [
            f"a teacher's prompt may have {run.max_teacher_prompt_len} tokens ({key}, rows of "
            f"{longest} with responses of {data.max_response_len}), no more than the policy's "
            f"(data.max_prompt_len={data.max_prompt_len}); allow longer rows with {source}, or set "
            "a larger self_distillation.max_prompt_len"
        ]
    return []

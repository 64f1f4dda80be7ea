"""Prompts of a teacher that reads more than the policy: self-distillation.

The teacher is a model of the run. Its prompt has a demonstration (SDFT,
https://arxiv.org/abs/2601.19897; OPSD, https://arxiv.org/abs/2601.18734) or the solution of another
sample of the group or feedback (SDPO, https://arxiv.org/abs/2601.20802); the policy's response
follows it.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jaxrl.config.keys import RunConfig, SelfDistillationConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.json_text import Message
from jaxrl.trainer.phases.rewards import Group
from jaxrl.types import Prompt, ScoredRollout, TrainingSample


def with_teacher_prompts(
    samples: Sequence[TrainingSample],
    groups: Sequence[Group],
    cfg: RunConfig,
    renderer: ChatRenderer,
) -> tuple[list[TrainingSample], dict[str, float]]:
    """(samples with `teacher_prompt`, metrics).

    There is one sample for each rollout of the groups. One without a text for the teacher, or
    whose prompt would be too long, keeps None.
    """
    settings = cfg.self_distillation
    contexts = [context_of(group, i, settings) for group in groups for i in range(len(group))]
    prompts = [scored.rollout.prompt for group in groups for scored in group]
    asked = [i for i, texts in enumerate(contexts) if texts]
    rendered = renderer.render_all(
        [teacher_messages(prompts[i], contexts[i], settings) for i in asked],
        [prompts[i].tools for i in asked],
    )
    filled = list(samples)
    for i, tokens in zip(asked, rendered, strict=True):
        if len(tokens) <= cfg.max_teacher_prompt_len:
            filled[i] = dataclasses.replace(samples[i], teacher_prompt=tokens)
    n = sum(s.teacher_prompt is not None for s in filled)
    return filled, {
        "self_distillation/context_fraction": n / len(samples),
        "self_distillation/too_long_fraction": (len(asked) - n) / len(samples),
    }


def context_of(group: Group, index: int, settings: SelfDistillationConfig) -> dict[str, str]:
    """The texts that the teacher of a sample of a group reads, by their name in the templates."""
    scored = group[index]
    found = {
        "demonstration": demonstration(scored.rollout.prompt, settings.demonstration),
        "solution": solution(group, index, settings),
        "feedback": scored.reward.feedback.strip(),
    }
    has_solution = "solution" in settings.context and found["solution"]
    if succeeded(scored, settings) or (has_solution and not settings.feedback_with_solution):
        found["feedback"] = ""
    return {name: text for name in settings.context if (text := found[name])}


def succeeded(scored: ScoredRollout, settings: SelfDistillationConfig) -> bool:
    """Whether the reward of a response is that of a success."""
    return scored.reward.value >= settings.success_reward


def demonstration(prompt: Prompt, column: str) -> str:
    """The text of a column of the prompt's row; "" if the row has none."""
    text = prompt.answer_text if column == "answer" else prompt.extra.get(column, "")
    return text if isinstance(text, str) else ""


def solution(group: Group, index: int, settings: SelfDistillationConfig) -> str:
    """The first successful response of the other samples, or the sample's own; "" without one."""
    others = [scored for i, scored in enumerate(group) if i != index]
    own = [group[index]] if settings.own_solution else []
    for scored in (*others, *own):
        if succeeded(scored, settings):
            text = scored.rollout.text
            shown = text.rpartition("</think>")[2] if settings.remove_thinking else text
            return shown.strip()
    return ""


def teacher_messages(
    prompt: Prompt, texts: Mapping[str, str], settings: SelfDistillationConfig
) -> list[Message]:
    """The prompt's messages with the texts in the last one."""
    templates = {
        "demonstration": settings.demonstration_template,
        "solution": settings.solution_template,
        "feedback": settings.feedback_template,
    }
    context = "\n\n".join(fill(templates[name], {name: text}) for name, text in texts.items())
    *before, last = prompt.messages
    content = fill(settings.template, {"prompt": last["content"], "context": context})
    return [*before, {**last, "content": content}]


def fill(template: str, texts: Mapping[str, str]) -> str:
    """The template with each {name} replaced; braces in the texts stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda found: texts.get(found[1], found[0]), template)


def read_by_teacher(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples that have a teacher's prompt, as the teacher reads them."""
    return [
        dataclasses.replace(s, prompt_tokens=s.teacher_prompt, support=None, experts=None)
        for s in samples
        if s.teacher_prompt is not None
    ]

"""Self-distillation that cannot mean anything is refused with the remedy."""

import pytest

from jaxrl.config.resolve import resolve
from tests.config.runnable import complaint, runnable

VALID = dict(
    algorithm__advantage="distill",
    algorithm__kl_coef=1.0,
    algorithm__kl_in="reward",
    self_distillation__context=("solution",),
)


def config(**changes):
    return runnable(**(VALID | changes))


def test_self_distillation_needs_no_further_model():
    assert resolve(config()).self_distillation.context == ("solution",)
    live = resolve(config(self_distillation__teacher="policy"))
    assert live.max_teacher_prompt_len == 8192 - live.data.max_response_len


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(self_distillation__context=()), "algorithm.teacher is ''"),
        (
            dict(self_distillation__context=(), self_distillation__teacher="policy"),
            "has no effect with self_distillation.context=()",
        ),
        (dict(self_distillation__context=("solution", "solution")), "names a text twice"),
        (dict(self_distillation__context=("sibling",)), "sibling"),
        (dict(self_distillation__demonstration="proof"), "add 'demonstration'"),
        (dict(self_distillation__feedback_with_solution=True), "add 'feedback'"),
        (dict(rollout__n=1), "rollout.n=1 gives none"),
        (dict(self_distillation__template="{context}"), "has no place {prompt}"),
        (dict(self_distillation__solution_template="see above"), "has no place {solution}"),
        (dict(algorithm__kl_coef=0.0), "no weight with"),
        (dict(algorithm__kl_in="loss"), "gives it another one"),
        (
            dict(self_distillation__teacher="policy", algorithm__ref_refresh_every=1),
            "there is none",
        ),
        (dict(env__name="calculator"), "env.name, env.agent or env.command"),
        (dict(data__rendered_prompts=True), "data.rendered_prompts=True has other prompts"),
        (dict(self_distillation__max_prompt_len=8192), "do not fit the longest"),
        (dict(self_distillation__max_prompt_len=64), "no more than the policy's"),
    ],
)
def test_what_cannot_mean_anything_is_refused(changes, message):
    assert message in complaint(config(**changes))

"""Keys of self-distillation: the teacher is the run's own model with more text in its prompt."""

import dataclasses

from jaxrl.config.choices import SELF_TEACHERS, TEACHER_CONTEXTS
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class SelfDistillationConfig:
    context: tuple[str, ...] = key(
        (),
        "What the teacher reads in addition to the prompt, in this order: demonstration = a column "
        "of the row (SDFT, OPSD), solution = another response to the prompt that succeeded, "
        "feedback = the text that reward functions return for the response (SDPO); () = the "
        "teacher reads the policy's prompt",
        choices=TEACHER_CONTEXTS,
    )
    teacher: str = key(
        "reference",
        "The model that reads it: reference = the reference model (the initial policy, a moving "
        "one with algorithm.ref_refresh_every, or algorithm.teacher); policy = the policy at the "
        "start of the step, which takes no further memory",
        choices=SELF_TEACHERS,
    )
    demonstration: str = key(
        "answer", "Column of the data with the demonstration; answer = the ground truth"
    )
    success_reward: float = key(
        1.0,
        "solution, feedback: smallest reward of a success, which is a solution for others and "
        "needs no feedback",
    )
    own_solution: bool = key(
        False,
        "solution: a response that succeeded may be shown to its own teacher, if no other one did",
    )
    remove_thinking: bool = key(
        True, "solution: show only what follows the last </think> of a response"
    )
    feedback_with_solution: bool = key(
        False, "feedback: show it also to a teacher that reads a solution"
    )
    max_prompt_len: int = key(
        0,
        "Maximum length of the teacher's prompt in tokens; a response whose prompt is longer has "
        "no teacher; 0 = as long as rows allow",
        ge=0,
    )
    template: str = key(
        "{prompt}\n\n{context}\n\nSolve the task again in your own words.",
        "Last message of the teacher's prompt: {prompt} is that of the policy, {context} the texts "
        "of the templates below, separated by empty lines",
    )
    demonstration_template: str = key(
        "An expert's response to this task:\n\n{demonstration}", "Text around a demonstration"
    )
    solution_template: str = key(
        "A correct solution to this task:\n\n{solution}", "Text around a solution"
    )
    feedback_template: str = key(
        "Feedback on an earlier attempt that was wrong:\n\n{feedback}", "Text around feedback"
    )

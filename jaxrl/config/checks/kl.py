"""Rules between the keys of the KL, its reference and the teacher."""

from jaxrl.config.choices import FULL_KLS
from jaxrl.config.keys import RunConfig, TeacherEndpointConfig
from jaxrl.config.teachers import model_teachers, read_teacher


def teacher_errors(run: RunConfig) -> list[str]:
    """One line per broken rule of the teacher, with the values and what to set instead."""
    algorithm = run.algorithm
    errors = _named_teacher_errors(run)
    distills = algorithm.advantage == "distill"
    if distills and not (algorithm.teacher or run.self_distillation.context):
        errors.append(
            "algorithm.advantage='distill' learns from a teacher alone, but algorithm.teacher is "
            "''; set a model folder, self_distillation.context, or another algorithm.advantage"
        )
    if (distills or algorithm.teacher) and not algorithm.has_kl:
        errors.append(
            f"algorithm.teacher={algorithm.teacher!r} has no weight with algorithm.kl_coef=0; set "
            "algorithm.kl_coef (1.0 with algorithm.advantage='distill')"
        )
    if distills and algorithm.kl_in == "loss" and algorithm.gamma != 1.0:
        errors.append(
            f"algorithm.gamma={algorithm.gamma} discounts token rewards, but "
            "algorithm.advantage='distill' has none with algorithm.kl_in='loss'; set "
            "algorithm.gamma=1.0, or algorithm.kl_in='reward'"
        )
    if algorithm.teacher and algorithm.ref_refresh_every:
        errors.append(
            f"algorithm.ref_refresh_every={algorithm.ref_refresh_every} would replace "
            f"algorithm.teacher={algorithm.teacher!r} by the policy; set only one of them"
        )
    return errors


def _named_teacher_errors(run: RunConfig) -> list[str]:
    """Rules of several teachers, and of those at a server."""
    algorithm, more = run.algorithm, run.algorithm.more_teachers
    if more and not algorithm.teacher:
        return [
            f"algorithm.more_teachers={more} are in addition to algorithm.teacher=''; set it to "
            "the teacher of all other rows"
        ]
    named = [("algorithm.teacher", algorithm.teacher)] if algorithm.teacher else []
    read = [read_teacher(*one) for one in (*named, *(("algorithm.more_teachers", m) for m in more))]
    if errors := [f"{teacher.key}={line}" for teacher, lines in read for line in lines]:
        return errors
    sources = [teacher.options.source for teacher, _ in read]
    if twice := sorted({source for source in sources if sources.count(source) > 1}):
        errors.append(
            f"algorithm.more_teachers={more} names {', '.join(twice)} more than once; give the "
            "rows of a data_source one teacher"
        )
    at_server = any(teacher.is_endpoint for teacher, _ in read)
    changed = run.teacher_endpoint != TeacherEndpointConfig()
    if changed and not at_server:
        errors.append(
            f"{run.teacher_endpoint} has no effect without a teacher at a server; set "
            "algorithm.teacher='http://host:8000/v1', or leave the keys of teacher_endpoint out"
        )
    shown = f"algorithm.teacher={algorithm.teacher!r}" + (f" and {more}" if more else "")
    if (at_server or more) and algorithm.kl in FULL_KLS and not algorithm.kl_top_k:
        errors.append(
            f"algorithm.kl={algorithm.kl!r} runs one teacher inside the update, but {shown} score "
            "before it; set algorithm.kl_top_k=20, or algorithm.kl='k1' with "
            "algorithm.kl_in='reward'"
        )
    return errors + (_endpoint_errors(run, shown) if at_server else [])


def _endpoint_errors(run: RunConfig, shown: str) -> list[str]:
    """A server scores text by the model itself, and returns a few tokens at each place."""
    errors = []
    if (temperature := run.rollout.sampling.temperature) != 1.0:
        errors.append(
            f"{shown}: a server's prompt logprobs are those of temperature 1, but "
            f"rollout.sampling.temperature={temperature} divides the policy's logits; set "
            "rollout.sampling.temperature=1.0, or a teacher in a folder"
        )
    if (source := run.algorithm.kl_top_k_from) != "teacher":
        errors.append(
            f"{shown}: a server returns the teacher's most likely tokens alone, and "
            f"algorithm.kl_top_k_from={source!r} compares those of the policy; set "
            "algorithm.kl_top_k_from='teacher', or a teacher in a folder"
        )
    if "reference" in run.learner.offload and not model_teachers(run.algorithm):
        errors.append(
            f"learner.offload={run.learner.offload}, but {shown} leave no reference on "
            "the devices; leave out 'reference'"
        )
    if run.data.images:
        errors.append(
            f"{shown}: a server gets token ids, and data.images=True has images; set a teacher in "
            "a folder"
        )
    return errors


def kl_errors(run: RunConfig) -> list[str]:
    """One line per broken rule of the KL and its reference."""
    errors, algorithm, kl = [], run.algorithm, run.algorithm.kl
    if run.data.teacher_logprobs and not (algorithm.kl_top_k and algorithm.has_kl):
        errors.append(
            f"data.teacher_logprobs={run.data.teacher_logprobs!r} has no weight with "
            f"algorithm.kl_top_k={algorithm.kl_top_k} and algorithm.kl_coef={algorithm.kl_coef}; "
            "set the number of ids that are compared, such as 20, algorithm.kl_coef=1.0 and "
            "algorithm.kl='jsd'"
        )
    if algorithm.kl_beta != 0.5 and kl != "jsd":
        errors.append(
            f"algorithm.kl_beta={algorithm.kl_beta} has no effect with algorithm.kl={kl!r}; set "
            "algorithm.kl='jsd', or algorithm.kl_beta=0.5"
        )
    if algorithm.kl_top_k and kl not in ("full", "jsd"):
        errors.append(
            f"algorithm.kl_top_k={algorithm.kl_top_k} has no effect with algorithm.kl={kl!r}, "
            "which compares no distributions; set algorithm.kl='jsd' or 'full', or "
            "algorithm.kl_top_k=0"
        )
    source = algorithm.kl_top_k_from
    if source != "teacher" and not algorithm.kl_top_k:
        errors.append(
            f"algorithm.kl_top_k_from={source!r} has no effect with algorithm.kl_top_k=0; set the "
            "number of ids that are compared, such as 20, or algorithm.kl_top_k_from='teacher'"
        )
    if source != "teacher" and run.data.teacher_logprobs:
        errors.append(
            f"algorithm.kl_top_k_from={source!r} needs the teacher's logprobs at the policy's "
            f"tokens, which no column such as data.teacher_logprobs={run.data.teacher_logprobs!r} "
            "has; set algorithm.kl_top_k_from='teacher', or algorithm.teacher with "
            "jaxrl.train"
        )
    if kl in FULL_KLS and not algorithm.has_kl:
        errors.append(
            f"algorithm.kl={kl!r} has no effect with algorithm.kl_coef=0, which loads no reference "
            "model; set algorithm.kl_coef above 0, or leave algorithm.kl at 'auto'"
        )
    if algorithm.kl_ratio_max and (not algorithm.has_kl or algorithm.kl_in == "reward"):
        errors.append(
            f"algorithm.kl_ratio_max={algorithm.kl_ratio_max} weights the KL in the loss, which "
            f"algorithm.kl_coef={algorithm.kl_coef} with algorithm.kl_in={algorithm.kl_in!r} does "
            "not have; set algorithm.kl_coef above 0 with algorithm.kl_in='loss', or "
            "algorithm.kl_ratio_max=0.0"
        )
    if algorithm.kl_ratio_max and kl == "k3_unbiased":
        errors.append(
            f"algorithm.kl_ratio_max={algorithm.kl_ratio_max} with algorithm.kl='k3_unbiased', "
            "which has the importance ratio already; set algorithm.kl='k3'"
        )
    if algorithm.kl_ratio_level != "token" and not algorithm.kl_ratio_max:
        errors.append(
            f"algorithm.kl_ratio_level={algorithm.kl_ratio_level!r} has no effect with "
            "algorithm.kl_ratio_max=0.0; set algorithm.kl_ratio_max, such as 2.0"
        )
    if algorithm.ref_refresh_every and not algorithm.has_kl:
        errors.append(
            f"algorithm.ref_refresh_every={algorithm.ref_refresh_every} has no effect with "
            "algorithm.kl_coef=0, which loads no reference model; set algorithm.kl_coef above 0, "
            "or algorithm.ref_refresh_every=0"
        )
    if algorithm.ref_refresh_rate != 1.0 and not algorithm.ref_refresh_every:
        errors.append(
            f"algorithm.ref_refresh_rate={algorithm.ref_refresh_rate} has no effect with "
            "algorithm.ref_refresh_every=0, which never changes the reference; set "
            "algorithm.ref_refresh_every, or algorithm.ref_refresh_rate=1.0"
        )
    if algorithm.kl_target and algorithm.kl_coef == 0:
        errors.append(
            f"algorithm.kl_target={algorithm.kl_target} adapts a weight that starts at "
            "algorithm.kl_coef=0 and would stay there; set algorithm.kl_coef to the initial "
            "weight, or algorithm.kl_target=0"
        )
    return errors

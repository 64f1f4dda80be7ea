"""Rules between the keys of the KL, its reference and the teacher."""

from jaxrl.config.choices import FULL_KLS
from jaxrl.config.keys import RunConfig


def teacher_errors(run: RunConfig) -> list[str]:
    """One line per broken rule of the teacher, with the values and what to set instead."""
    errors, algorithm = [], run.algorithm
    distills = algorithm.advantage == "distill"
    if distills and not (algorithm.teacher or run.self_distillation.context):
        errors.append(
            "algorithm.advantage='distill' learns from a teacher alone, but algorithm.teacher is "
            "''; set a model folder, self_distillation.context, or another algorithm.advantage"
        )
    if (distills or algorithm.teacher) and algorithm.kl_coef == 0:
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


def kl_errors(run: RunConfig) -> list[str]:
    """One line per broken rule of the KL and its reference."""
    errors, algorithm, kl = [], run.algorithm, run.algorithm.kl
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
    if kl in FULL_KLS and algorithm.kl_coef == 0:
        errors.append(
            f"algorithm.kl={kl!r} has no effect with algorithm.kl_coef=0, which loads no reference "
            "model; set algorithm.kl_coef above 0, or leave algorithm.kl at 'auto'"
        )
    if algorithm.ref_refresh_every and algorithm.kl_coef == 0:
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

"""The losses of TRL's trainers of preferences and of process reward models, and the keys here."""

from jaxrl.config.choices import LABELLED_LOSSES
from jaxrl.migrate.migration import DIFFERS, Migration, listed
from jaxrl.migrate.trl_names import DIVERGENCES, PREFERENCES, REFERENCE_FREE, SMOOTHED


def dpo(found: Migration) -> None:
    names = listed(found.get("loss_type"))
    if not names or not set(names) <= PREFERENCES.keys() or names[0] == "sft":
        known = ", ".join(PREFERENCES)
        found.refuse("loss_type", f"jaxrl has {known}, sft not first", "preference.loss")
        return
    found.config["preference.loss"] = PREFERENCES[names[0]]
    if len(names) > 1:
        found.config["preference.more_losses"] = tuple(PREFERENCES[name] for name in names[1:])
    if weights := found.get("loss_weights"):
        found.config["preference.loss_weights"] = tuple(map(float, listed(weights)))
    if "ipo" in names:
        found.config["preference.ipo_reduction"] = "mean"
    if "discopop" in names:
        found.carry("discopop_tau", "preference.discopop_tau")
    if found.get("ld_alpha") is not None:
        found.carry("ld_alpha", "preference.ld_alpha", float)
    found.carry("use_weighting", "preference.weighted")
    divergence = str(found.get("f_divergence_type", "reverse_kl")).rpartition(".")[2].lower()
    found.config["preference.f_divergence"] = DIVERGENCES.get(divergence, divergence)
    if divergence == "alpha_divergence":
        found.carry("f_alpha_divergence_coef", "preference.f_alpha", float)
    smoothing = found.number("label_smoothing", 0.0)
    if set(names) & set(SMOOTHED):
        found.config["preference.label_smoothing"] = smoothing
    if smoothing and not set(names) <= set(SMOOTHED):
        found.refuse(
            "label_smoothing",
            f"TRL smooths {', '.join(SMOOTHED)} alone (older versions: sigmoid too, as cDPO), "
            "jaxrl all losses of the run that have it; decide",
            "preference.label_smoothing",
        )


def kto(found: Migration) -> None:
    found.carry("desirable_weight", "preference.chosen_weight")
    found.carry("undesirable_weight", "preference.rejected_weight")
    found.choose("loss_type", {name: name for name in LABELLED_LOSSES}, "preference.loss")


def cpo(found: Migration) -> None:
    """CPO, and SimPO with the term of chosen answers as another loss."""
    name, alpha = str(found.get("loss_type")), float(found.number("cpo_alpha", 1.0))
    if name == "alphapo":  # TRL's name of SimPO without the term of chosen answers
        name, alpha = "simpo", 0.0
    if name not in REFERENCE_FREE:
        found.refuse("loss_type", f"jaxrl has {', '.join(REFERENCE_FREE)}", "preference.loss")
        return
    found.config["preference.loss"] = REFERENCE_FREE[name]
    if name == "ipo":
        found.config["preference.ipo_reduction"] = "mean"
    found.carry("alpha", "preference.alphapo_alpha", float)
    if name in ("sigmoid", "simpo"):
        found.carry("label_smoothing", "preference.label_smoothing", float)
    if name != "simpo":
        found.config["preference.cpo_alpha"] = alpha
        return
    found.carry("simpo_gamma", "preference.simpo_gamma", float)
    if alpha:
        found.config["preference.more_losses"] = ("sft",)
        found.config["preference.loss_weights"] = (1.0, alpha)


def orpo(found: Migration) -> None:
    found.config["preference.loss"] = "orpo"
    found.note(
        DIFFERS, "ORPOTrainer", "the likelihood of TRL's ORPO includes prompts, that here does not"
    )


def process_rewards(found: Migration) -> None:
    """Labels of steps. TRL's head has two logits, whose difference is the score here."""
    found.config["reward_model.objective"] = "steps"
    found.carry("step_separator", "reward_model.step_separator", str)
    found.refuse_unless(
        "train_on_last_step_only",
        False,
        "every step with a label is trained on; keep only the last step's label in the data, with "
        "the steps before it in the prompt",
    )
    for name in ("max_prompt_length", "max_completion_length"):
        if found.get(name) is not None:
            reason = "max_length is the limit of prompt and steps; longer rows are not truncated"
            found.note(DIFFERS, name, reason)
    found.note(
        DIFFERS,
        "step_separator",
        "the chat template is rendered here, and no separator follows the last step",
    )


TRAINERS = {"dpo": dpo, "kto": kto, "cpo": cpo, "orpo": orpo}

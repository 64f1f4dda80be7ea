"""verl's rollout correction: importance weights and rejections between engine and trainer."""

from jaxrl.config.choices import RATIO_REJECTIONS, REJECTIONS
from jaxrl.migrate.migration import UNNEEDED, Migration
from jaxrl.migrate.verl_names import CORRECTION


def correction(found: Migration) -> None:
    """Rollout correction: importance weights and rejection between engine and trainer."""
    bypass = found.get(CORRECTION + "bypass_mode", False)
    reinforce = found.get(CORRECTION + "loss_type", "ppo_clip") == "reinforce"
    kinds = {"None": "none", "token": "token_tis", "sequence": "seq_tis"}
    if bypass:
        found.config["algorithm.old_logp"] = "rollout"
        if reinforce:
            found.config["algorithm.policy_loss"] = "policy_gradient"
    if bypass and not reinforce and found.settings.values.get(CORRECTION + "rollout_is"):
        found.note(
            UNNEEDED,
            CORRECTION + "rollout_is",
            "with bypass_mode the ratio itself is against the engine's logprobs",
        )
    else:
        found.choose(CORRECTION + "rollout_is", kinds, "algorithm.correction")
    if found.config.get("algorithm.correction", "none") != "none":
        weight_bounds(found)
        normalize = CORRECTION + "rollout_is_batch_normalize"
        found.carry(normalize, "algorithm.correction_normalize")
    rejections(found)


def rejections(found: Migration) -> None:
    """The masks of rollout_rs, joined by commas, with one threshold each or one for all."""
    name = CORRECTION + "rollout_rs"
    if name in found.settings.unresolved:
        return
    names = [part.strip() for part in str(found.get(name)).split(",") if part.strip()]
    if names in ([], ["None"]):
        found.config["algorithm.rejection"] = "none"
        return
    if unknown := [one for one in names if one not in REJECTIONS or one == "none"]:
        known = ", ".join(sorted(set(REJECTIONS) - {"none"}))
        found.refuse(name, f"{unknown[0]} is not known; jaxrl has {known}", "algorithm.rejection")
        return
    thresholds = str(found.get(name + "_threshold", "")).split(",")
    if len(thresholds) not in (1, len(names)):
        found.refuse(name + "_threshold", "it needs one threshold, or one per rejection")
        return
    thresholds = thresholds * len(names) if len(thresholds) == 1 else thresholds
    first, *others = [
        rejection_bounds(one, threshold.strip())
        for one, threshold in zip(names, thresholds, strict=True)
    ]
    found.config["algorithm.rejection"] = names[0]
    found.config |= {f"algorithm.rejection_{bound}": value for bound, value in first.items()}
    if others:
        found.config["algorithm.more_rejections"] = tuple(
            f"{one}?" + "&".join(f"{bound}={value!r}" for bound, value in bounds.items())
            for one, bounds in zip(names[1:], others, strict=True)
        )


def rejection_bounds(name: str, threshold: str) -> dict[str, float]:
    """low and high, or max, of a rejection of verl's name."""
    if name in RATIO_REJECTIONS:
        return dict(zip(("low", "high"), ratio_bounds(threshold), strict=True))
    return {"max": float(threshold or 0.01)}


def weight_bounds(found: Migration) -> None:
    """The maximum of importance weights; with a minimum, "low_high", those outside are masked."""
    bounds = str(found.get(CORRECTION + "rollout_is_threshold", 2.0))
    low, _, high = bounds.rpartition("_")
    if low:
        masks = {"token_tis": "icepop", "seq_tis": "seq_icepop"}
        found.config["algorithm.correction"] = masks[found.config["algorithm.correction"]]
        found.config["algorithm.correction_low"] = float(low)
    found.config["algorithm.correction_high"] = float(high)


def ratio_bounds(bounds: str) -> tuple[float, float]:
    """Bounds of the trainer's over the engine's probability.

    verl bounds the engine's over the trainer's, as "low_high" or one number for 1 / high and high.
    """
    low, _, high = bounds.partition("_")
    if not high:
        low, high = str(1 / float(low or 2.0)), low or "2.0"
    return 1 / float(high), 1 / float(low)

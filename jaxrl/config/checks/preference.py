"""Rules between the keys of preference optimization."""

from jaxrl.config.choices import (
    CPO_LOSSES,
    F_DIVERGENCE_LOSSES,
    IPO_LOSSES,
    LABELLED_LOSSES,
    PREFERENCE_LOSSES,
    REFERENCE_FREE_LOSSES,
    SMOOTHED_LOSSES,
)
from jaxrl.config.keys import PreferenceConfig, RunConfig
from jaxrl.config.schema import changed_keys

# Losses that read a key: with none of them, another value than the default has no effect.
READERS = {
    "label_smoothing": SMOOTHED_LOSSES,
    "ipo_reduction": IPO_LOSSES,
    "simpo_gamma": ("simpo",),
    "cpo_alpha": CPO_LOSSES,
    "alphapo_alpha": ("simpo", *CPO_LOSSES),
    "discopop_tau": ("discopop",),
    "chosen_weight": LABELLED_LOSSES,
    "rejected_weight": LABELLED_LOSSES,
}


def preference_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    preference = run.preference
    return [
        *_unpaired_errors(run),
        *_sum_errors(preference),
        *_unread_errors(preference),
        *_smoothing_errors(preference),
        *_divergence_errors(preference),
        *_length_errors(preference),
        *_reference_errors(run),
        *_weight_errors(preference),
    ]


def preference_warnings(run: RunConfig) -> list[str]:
    preference = run.preference
    if "simpo" not in preference.names or preference.beta >= 1.0:
        return []
    return [
        f"preference.beta={preference.beta} with the loss simpo, whose mean logprobs per token are "
        "small numbers: the paper has 2 to 10; set preference.beta=2.0, and preference.simpo_gamma "
        "to about half of it"
    ]


def only_offline_errors(run: RunConfig) -> list[str]:
    """One line for keys of offline training that reinforcement learning does not read."""
    changed = changed_keys("preference", run.preference, PreferenceConfig())
    if run.reward_model.objective != "pairs":
        changed.append(f"reward_model.objective={run.reward_model.objective!r}")
    if not changed:
        return []
    return [
        f"{', '.join(changed)} have no effect in reinforcement learning; omit them, or run "
        "jaxrl.dpo or jaxrl.reward_model (algorithm.advantage='online_dpo' has a pairwise loss)"
    ]


def _unpaired_errors(run: RunConfig) -> list[str]:
    errors, preference = [], run.preference
    if preference.loss == "kto" and run.mini_batch_prompts == 1:
        errors.append(
            "preference.loss='kto' estimates the KL from answers combined with prompts of other "
            "pairs, but an update has one pair; set learner.mini_batch_prompts (or "
            "data.prompts_per_step) to 2 or more, or preference.loss='dpo'"
        )
    unpaired = [name for name in preference.names if name in LABELLED_LOSSES]
    if unpaired and preference.more_losses:
        errors.append(
            f"preference.loss={preference.loss!r} with preference.more_losses="
            f"{preference.more_losses} adds others to {unpaired[0]}, which scores answers without "
            f"a pair; set preference.loss={unpaired[0]!r} alone, or "
            "preference.more_losses=('bco_pair',)"
        )
    return errors


def _sum_errors(preference: PreferenceConfig) -> list[str]:
    """Repeated losses, and weights that do not match them."""
    errors, names, weights = [], preference.names, preference.loss_weights
    if len(set(names)) < len(names):
        errors.append(
            f"preference.loss={preference.loss!r} with preference.more_losses="
            f"{preference.more_losses} names a loss twice; give it once, with a larger weight in "
            "preference.loss_weights"
        )
    if weights and len(weights) != len(names):
        errors.append(
            f"preference.loss_weights={weights} has {len(weights)} weights for the "
            f"{len(names)} losses {', '.join(names)}; give one for each, preference.loss first"
        )
    return errors


def _unread_errors(preference: PreferenceConfig) -> list[str]:
    errors, default = [], PreferenceConfig()
    for key, readers in READERS.items():
        value = getattr(preference, key)
        if value != getattr(default, key) and not set(readers) & set(preference.names):
            errors.append(
                f"preference.{key}={value!r} has no effect with {_named(preference)}; set "
                f"preference.loss={' or '.join(map(repr, readers))}, or "
                f"preference.{key}={getattr(default, key)!r}"
            )
    if preference.f_alpha != default.f_alpha and preference.f_divergence != "alpha":
        errors.append(
            f"preference.f_alpha={preference.f_alpha} has no effect with preference.f_divergence="
            f"{preference.f_divergence!r}; set preference.f_divergence='alpha', or "
            f"preference.f_alpha={default.f_alpha}"
        )
    return errors


def _smoothing_errors(preference: PreferenceConfig) -> list[str]:
    errors, smoothing = [], preference.label_smoothing
    if "robust" in preference.names and smoothing == 0.5:
        errors.append(
            "the loss robust divides by 1 - 2 preference.label_smoothing, which is 0; set "
            "preference.label_smoothing below 0.5, for example 0.1"
        )
    if "exo_pair" in preference.names and smoothing == 0.0:
        errors.append(
            "the loss exo_pair has log(preference.label_smoothing), which is infinite at 0; set "
            "preference.label_smoothing=1e-3, as in its paper"
        )
    return errors


def _divergence_errors(preference: PreferenceConfig) -> list[str]:
    others = _others(preference, (*F_DIVERGENCE_LOSSES, "sft"))
    if preference.f_divergence == "reverse_kl" or not others:
        return []
    return [
        f"preference.f_divergence={preference.f_divergence!r} has no meaning for "
        f"{', '.join(others)}, which compares more than a difference of log ratios; set one of "
        f"{', '.join(F_DIVERGENCE_LOSSES)}, or preference.f_divergence='reverse_kl'"
    ]


def _length_errors(preference: PreferenceConfig) -> list[str]:
    others = _others(
        preference,
        [n for n in PREFERENCE_LOSSES if n not in (*REFERENCE_FREE_LOSSES, *LABELLED_LOSSES)],
    )
    if preference.ld_alpha == 1.0 or not others:
        return []
    return [
        f"preference.ld_alpha={preference.ld_alpha} weights the tokens of log ratios to a "
        f"reference model of a pair, which {', '.join(others)} does not have; set "
        "preference.loss='dpo', or preference.ld_alpha=1.0"
    ]


def _reference_errors(run: RunConfig) -> list[str]:
    if run.preference.has_reference or "reference" not in run.learner.offload:
        return []
    return [
        f"learner.offload={run.learner.offload}, but {_named(run.preference)} loads no reference "
        "model; leave out 'reference'"
    ]


def _weight_errors(preference: PreferenceConfig) -> list[str]:
    """Weights of pairs need losses of a pair each."""
    whole = [n for n in preference.names if n in (*LABELLED_LOSSES, "aot", "aot_unpaired")]
    if not preference.weighted or not whole:
        return []
    return [
        f"preference.weighted=True weights pairs, but the loss {whole[0]} compares answers without "
        "a pair or ranks of a whole batch; set preference.loss='dpo', or preference.weighted=False"
    ]


def _others(preference: PreferenceConfig, known: list[str] | tuple[str, ...]) -> list[str]:
    return [name for name in preference.names if name not in known]


def _named(preference: PreferenceConfig) -> str:
    more = f" and preference.more_losses={preference.more_losses}" if preference.more_losses else ""
    return f"preference.loss={preference.loss!r}{more}"

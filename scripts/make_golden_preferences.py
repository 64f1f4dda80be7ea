"""Writes the losses and gradients of TRL's preference trainers to tests/algorithms/golden/.

preference.json has the logprobs of the tokens of some pairs under a policy and a reference; for
each case the keys of config.preference, the loss that TRL 1.16 computes, and its gradient with
respect to the policy's logprobs; and scores of a reward model with TRL's loss of them. The losses
are computed by the methods of the trainers themselves, on a model that returns the given logprobs.

torch and trl are not dependencies of the project; run this in a separate environment:
    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch trl==1.16.0
    /tmp/trl/bin/python scripts/make_golden_preferences.py tests/algorithms/golden
"""

import collections
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import trl  # pyright: ignore[reportMissingImports]
from trl.experimental.cpo import CPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.orpo import ORPOTrainer  # pyright: ignore[reportMissingImports]

CHOSEN_LENS, REJECTED_LENS = (3, 5, 2, 4), (4, 2, 5, 4)
N, T = len(CHOSEN_LENS), max(CHOSEN_LENS + REJECTED_LENS)
MASK = np.arange(T) < np.array(CHOSEN_LENS + REJECTED_LENS)[:, None]
# log Σ π² at every token, which TRL's WPO weights read
COLLISIONS = -np.random.default_rng(1).exponential(1.0, MASK.shape).astype(np.float32)
MPO = {"more_losses": ["bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
# keys of config.preference: arguments of TRL
DPO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss": "dpo"}, {"loss_types": ["sigmoid"]}),
    ({"loss": "dpo_norm", "beta": 2.0}, {"loss_types": ["sigmoid_norm"]}),
    ({"loss": "hinge"}, {"loss_types": ["hinge"]}),
    ({"loss": "ipo", "ipo_reduction": "mean"}, {"loss_types": ["ipo"]}),
    ({"loss": "robust", "label_smoothing": 0.1}, {"loss_types": ["robust"]}),
    ({"loss": "exo_pair", "label_smoothing": 0.001}, {"loss_types": ["exo_pair"]}),
    ({"loss": "nca_pair"}, {"loss_types": ["nca_pair"]}),
    ({"loss": "bco_pair"}, {"loss_types": ["bco_pair"]}),
    ({"loss": "sppo_hard"}, {"loss_types": ["sppo_hard"]}),
    ({"loss": "aot"}, {"loss_types": ["aot"]}),
    ({"loss": "aot", "label_smoothing": 0.1}, {"loss_types": ["aot"]}),
    ({"loss": "aot_unpaired"}, {"loss_types": ["aot_unpaired"]}),
    ({"loss": "apo_zero"}, {"loss_types": ["apo_zero"]}),
    ({"loss": "apo_down"}, {"loss_types": ["apo_down"]}),
    ({"loss": "discopop"}, {"loss_types": ["discopop"]}),
    ({"loss": "discopop", "discopop_tau": 0.5}, {"loss_types": ["discopop"]}),
    ({"loss": "dpo", **MPO}, {"loss_types": ["sigmoid", "bco_pair", "sft"]}),
    ({"loss": "dpo", "ld_alpha": 0.5}, {"loss_types": ["sigmoid"]}),
    ({"loss": "dpo", "ld_alpha": 0.0}, {"loss_types": ["sigmoid"]}),
    ({"loss": "ipo", "ipo_reduction": "mean", "ld_alpha": 0.3}, {"loss_types": ["ipo"]}),
    ({"loss": "aot", "ld_alpha": 0.5}, {"loss_types": ["aot"]}),
    ({"loss": "dpo", "weighted": True}, {"loss_types": ["sigmoid"]}),
    (
        {"loss": "ipo", "ipo_reduction": "mean", "more_losses": ["bco_pair"]}
        | {"loss_weights": [0.8, 0.2], "weighted": True},
        {"loss_types": ["ipo", "bco_pair"]},
    ),
    ({"loss": "dpo", "f_divergence": "forward_kl"}, {"loss_types": ["sigmoid"]}),
    ({"loss": "hinge", "f_divergence": "js"}, {"loss_types": ["hinge"]}),
    ({"loss": "dpo", "f_divergence": "js"}, {"loss_types": ["sigmoid"]}),
    ({"loss": "dpo", "f_divergence": "alpha"}, {"loss_types": ["sigmoid"]}),
    ({"loss": "dpo", "f_divergence": "alpha", "f_alpha": 1.0}, {"loss_types": ["sigmoid"]}),
    (
        {"loss": "exo_pair", "label_smoothing": 0.1, "f_divergence": "alpha", "f_alpha": 1.5},
        {"loss_types": ["exo_pair"]},
    ),
]
DIVERGENCES = {"js": "js_divergence", "alpha": "alpha_divergence"}
CPO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss": "cpo"}, {"loss_type": "sigmoid", "cpo_alpha": 1.0}),
    (
        {"loss": "cpo", "cpo_alpha": 0.5, "label_smoothing": 0.1},
        {"loss_type": "sigmoid", "cpo_alpha": 0.5},
    ),
    ({"loss": "simpo", "beta": 2.0}, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    (
        {"loss": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.1},
        {"loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    (
        {"loss": "simpo", "beta": 2.0, "more_losses": ["sft"], "loss_weights": [1.0, 0.7]},
        {"loss_type": "simpo", "cpo_alpha": 0.7},
    ),
    ({"loss": "cpo_hinge", "beta": 0.5}, {"loss_type": "hinge", "cpo_alpha": 1.0}),
    (
        {"loss": "cpo_ipo", "ipo_reduction": "mean", "cpo_alpha": 0.5},
        {"loss_type": "ipo", "cpo_alpha": 0.5},
    ),
    ({"loss": "cpo", "alphapo_alpha": 0.1}, {"loss_type": "sigmoid", "cpo_alpha": 1.0}),
    (
        {"loss": "simpo", "beta": 2.0, "alphapo_alpha": 0.25},
        {"loss_type": "simpo", "cpo_alpha": 0.0},
    ),
]
LABELS = [True, False, True, True, False, True, False, False]  # of all completions
LABELLED = [
    {"loss": "kto", "beta": 0.1},
    {"loss": "kto", "beta": 0.5, "chosen_weight": 1.5, "rejected_weight": 0.7},
    {"loss": "apo_zero_unpaired", "beta": 0.5, "chosen_weight": 1.5, "rejected_weight": 0.7},
]
ORPO = [{"loss": "orpo"}, {"loss": "orpo", "beta": 0.5}]


class Given(torch.nn.Module):
    """A model that returns given logprobs of the targets [2N, T]."""

    is_gradient_checkpointing = False

    def __init__(self, logp: np.ndarray):
        super().__init__()
        self.logp = torch.nn.Parameter(torch.from_numpy(logp))

    def forward(self, *args, **kwargs):
        logp = self.logp
        if kwargs.get("fused_lm_head"):
            zeros = torch.zeros_like(logp)
            extra: dict[str, torch.Tensor] = {"entropy": zeros, "mean_logits": zeros}
            extra["log_sum_sq_probs"] = torch.from_numpy(COLLISIONS)
            return SimpleNamespace(log_probs=logp, is_top1=zeros > 0, **extra)
        # A vocabulary of two tokens; all targets are token 1. The last position has no target.
        other = torch.log(-torch.expm1(logp))
        logits = torch.stack([other, logp], dim=-1)
        return SimpleNamespace(logits=torch.nn.functional.pad(logits, (0, 0, 0, 1)))


def accelerator() -> SimpleNamespace:
    def same(x):
        return x

    return SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)


def dpo_loss(keys: dict[str, Any], theirs: dict[str, Any], model: Given, reference: Given):
    divergence = keys.get("f_divergence", "reverse_kl")
    trainer = SimpleNamespace(
        model=model,
        ref_model=reference,
        args=SimpleNamespace(
            gradient_checkpointing_kwargs=None, discopop_tau=keys.get("discopop_tau", 0.05)
        ),
        accelerator=accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ld_alpha=keys.get("ld_alpha"),
        f_divergence_type=DIVERGENCES.get(divergence, divergence),
        f_alpha_divergence_coef=keys.get("f_alpha", 0.5),
        loss_weights=keys.get("loss_weights") or [1.0] * len(theirs["loss_types"]),
        beta=keys.get("beta", 0.1),
        label_smoothing=keys.get("label_smoothing", 0.0),
        use_weighting=keys.get("weighted", False),
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **theirs,
    )
    mask = torch.nn.functional.pad(torch.from_numpy(MASK), (1, 0)).long()
    inputs = {"input_ids": mask, "completion_mask": mask, "attention_mask": torch.ones_like(mask)}
    # Logprobs beyond a completion are 0, as those of the labels that TRL ignores
    return trl.DPOTrainer._compute_loss(trainer, model, inputs, False)


def labelled_loss(keys: dict[str, Any], model: Given, reference: Given, kl: np.ndarray):
    """KTO of the completions as single ones; `kl` has those with other prompts, of both models."""
    mismatched = {id(model): torch.from_numpy(kl[0]), id(reference): torch.from_numpy(kl[1])}
    trainer = SimpleNamespace(
        model=model,
        ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        accelerator=accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        loss_type=keys["loss"],
        calculate_KL=keys["loss"] == "kto",
        beta=keys["beta"],
        desirable_weight=keys.get("chosen_weight", 1.0),
        undesirable_weight=keys.get("rejected_weight", 1.0),
        _compute_kl_logps=lambda model, batch: mismatched[id(model)],
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    mask = torch.nn.functional.pad(torch.from_numpy(MASK), (1, 0)).long()
    inputs = {"input_ids": mask, "completion_mask": mask, "attention_mask": torch.ones_like(mask)}
    inputs["label"] = torch.tensor(LABELS)
    return trl.KTOTrainer._compute_loss(trainer, model, inputs, False)


def reference_free_loss(kind: type, settings: dict[str, Any], model: Given):
    """The prompt is one token, so that it is in no term: ORPO's includes prompts otherwise."""
    trainer = SimpleNamespace(
        accelerator=accelerator(), is_encoder_decoder=False, aux_loss_enabled=False, **settings
    )
    trainer.pad_token_id = trainer.padding_value = 0
    trainer.label_pad_token_id = -100
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(trainer, name, getattr(kind, name))
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(kind, name):
            setattr(trainer, name, getattr(kind, name).__get__(trainer))
    batch = {}
    for side, rows in (("chosen", MASK[:N]), ("rejected", MASK[N:])):
        mask = torch.nn.functional.pad(torch.from_numpy(rows), (1, 0))
        batch[f"{side}_input_ids"] = mask.long()
        batch[f"{side}_attention_mask"] = (mask | (torch.arange(T + 1) == 0)).long()
        batch[f"{side}_labels"] = torch.where(mask, 1, -100)
    return kind.get_batch_loss_metrics(trainer, model, batch)[0]


def case(keys: dict[str, Any], loss: torch.Tensor, model: Given) -> dict[str, Any]:
    (slope,) = torch.autograd.grad(loss, [model.logp])
    return {"keys": keys, "loss": loss.item(), "gradient": ragged(slope.numpy())}


def ragged(values: np.ndarray) -> list[list[float]]:
    return [row[mask].tolist() for row, mask in zip(values, MASK, strict=True)]


def reward_cases(rng: np.random.Generator) -> dict[str, Any]:
    """TRL's loss of rewards is inlined in the trainer: a model gives it the scores."""
    scores = rng.standard_normal((2, N)).astype(np.float32)
    margins, found = rng.random(N).astype(np.float32), []
    for coefficient in (None, 0.01, 0.5):
        for given in (False, True):
            leaf = torch.tensor(scores.reshape(-1, 1), requires_grad=True)
            trainer = SimpleNamespace(
                model=SimpleNamespace(training=True),
                args=SimpleNamespace(center_rewards_coefficient=coefficient),
                accelerator=accelerator(),
                aux_loss_enabled=False,
                _metrics={"train": collections.defaultdict(list)},
                _total_train_tokens=0,
                _tp_size=1,
            )
            inputs = {"attention_mask": torch.ones(1)}
            inputs |= {"margin": torch.from_numpy(margins)} if given else {}
            model = lambda leaf=leaf, **kwargs: SimpleNamespace(logits=leaf)  # noqa: E731
            loss = trl.RewardTrainer.compute_loss(trainer, model, inputs)
            (slope,) = torch.autograd.grad(loss, [leaf])
            keys = {"center_coef": coefficient or 0.0, "margin_weight": float(given)}
            found.append({"keys": keys, "loss": loss.item(), "gradient": slope[:, 0].tolist()})
    return {"scores": scores.tolist(), "margins": margins.tolist(), "cases": found}


def main() -> None:
    rng = np.random.default_rng(0)
    policy = -rng.exponential(1.0, (2 * N, T)).astype(np.float32) * MASK
    reference = -rng.exponential(1.0, (2 * N, T)).astype(np.float32) * MASK
    cases = []
    for keys, theirs in DPO:
        model = Given(policy)
        cases.append(case(keys, dpo_loss(keys, theirs, model, Given(reference)), model))
    inside = np.where(MASK, policy, np.float32(-1.0))  # those outside are ignored, but finite
    for keys, theirs in CPO:
        settings = theirs | {"beta": keys.get("beta", 0.1)}
        settings |= {"alpha": keys.get("alphapo_alpha", 0.0)}
        settings |= {"label_smoothing": keys.get("label_smoothing", 0.0)}
        settings |= {"simpo_gamma": keys.get("simpo_gamma", 0.5)}
        model = Given(inside)
        cases.append(case(keys, reference_free_loss(CPOTrainer, settings, model), model))
    for keys in ORPO:
        model = Given(inside)
        settings = {"beta": keys.get("beta", 0.1)}
        cases.append(case(keys, reference_free_loss(ORPOTrainer, settings, model), model))
    kl, labelled = -rng.exponential(5.0, (2, 2 * N)).astype(np.float32), []
    for keys in LABELLED:
        model = Given(policy)
        loss = labelled_loss(keys, model, Given(reference), kl)
        labelled.append(case(keys, loss, model))
    found = {
        "trl": trl.__version__,
        "policy": ragged(policy),
        "reference": ragged(reference),
        "collisions": ragged(COLLISIONS),
        "cases": cases,
        "labelled": {"labels": LABELS, "mismatched": kl.tolist(), "cases": labelled},
        "rewards": reward_cases(rng),
    }
    text = json.dumps(found, indent=0).replace(",\n", ", ").replace("[\n", "[").replace("\n]", "]")
    Path(sys.argv[1], "preference.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

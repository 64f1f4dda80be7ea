"""Learning rate schedules and optimizer steps against hand-computed numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config.keys import LearnerConfig
from jaxrl.learner.optimizer import clip_factor, lr_schedule, make_optimizer
from jaxrl.learner.optimizers.patterns import weight_decays
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import ParamSpec
from tests.learner.tiny_policy import MODEL

SPECS = {
    "w": ParamSpec((2, 2), (None, None), "normal", "w", (2, 2)),
    "b": ParamSpec((2, 2), (None, None), "zeros", "b", (4,)),  # a bias of two heads of two
}


def rates(at, total=12, **keys):
    schedule = lr_schedule(LearnerConfig(lr=2.0, **keys), total)
    return [float(schedule(k)) for k in at]


def test_warm_up_rises_by_equal_steps_and_starts_above_zero():
    # 2 * (1, 2, 3, 4) / 4
    got = rates([0, 1, 2, 3, 4, 99], lr_schedule="constant", warmup_steps=4)
    np.testing.assert_allclose(got, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear_falls_to_the_minimum_at_the_last_update():
    # from update 4 on: 2 * (1 - 0.75 * (k - 4) / 8), ends at 2 * 0.25
    keys = dict(lr_schedule="linear", warmup_steps=4, min_lr_ratio=0.25)
    np.testing.assert_allclose(rates([3, 4, 8, 12, 20], **keys), [2.0, 2.0, 1.25, 0.5, 0.5])


def test_cosine_has_the_mean_rate_at_half_time():
    # 2 * (0.1 + 0.9 * (1 + cos(pi / 2)) / 2) = 2 * 0.55
    keys = dict(lr_schedule="cosine", min_lr_ratio=0.1)
    np.testing.assert_allclose(rates([0, 6, 12], **keys), [2.0, 1.1, 0.2], rtol=1e-6)


def test_a_falling_schedule_that_is_all_warm_up_is_an_error():
    with pytest.raises(ValueError, match="all of them are warm-up"):
        lr_schedule(LearnerConfig(lr_schedule="linear", warmup_steps=12), 12)


@pytest.mark.parametrize("key", ["lr_schedule", "optimizer"])
def test_unknown_names_are_errors(key):
    cfg = dataclasses.replace(LearnerConfig(), **{key: "adamm"})
    with pytest.raises(ValueError, match=rf"learner\.{key} = 'adamm'"):
        make_optimizer(cfg, 10, SPECS)


def step(cfg, grads):
    params = {name: jnp.ones((2, 2)) for name in SPECS}
    transform = make_optimizer(cfg, 10, SPECS).transform
    updates, _ = transform.update(grads, transform.init(params), params)
    return optax.apply_updates(params, updates)


def test_adamw_steps_by_lr_and_decays_matrices_only():
    cfg = LearnerConfig(lr=0.1, weight_decay=0.5, eps=0.0)
    new = step(cfg, {"w": jnp.full((2, 2), 3.0), "b": jnp.full((2, 2), -3.0)})
    # first step of Adam is sign(g): 1 - 0.1 * (1 + 0.5 * 1) and 1 - 0.1 * -1
    np.testing.assert_allclose(new["w"], 0.85, rtol=1e-6)
    np.testing.assert_allclose(new["b"], 1.1, rtol=1e-6)


@pytest.mark.parametrize(
    ("norm", "clip_norm", "want"), [(10.0, 0.5, 0.05), (0.4, 0.5, 1.0), (10.0, 0.0, 1.0)]
)
def test_a_gradient_above_the_clip_norm_is_scaled_to_it(norm, clip_norm, want):
    np.testing.assert_allclose(clip_factor(jnp.float32(norm), clip_norm), want, rtol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_weight_decay_applies_to_matrices_of_the_hugging_face_layout(stacked):
    specs = decoder_specs(dataclasses.replace(MODEL, stacked=stacked))
    decayed = jax.tree_util.tree_leaves_with_path(weight_decays(LearnerConfig(), specs))
    names = {jax.tree_util.keystr(path): decays for path, decays in decayed}
    assert all(bool(d) != (".b" in n or "norm" in n) for n, d in names.items()), names

"""Optimizers by import path: optax's, with options, schedule, decay and clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config.keys import LearnerConfig
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.models.spec import ParamSpec

SPECS = {
    "w": ParamSpec((2, 4), ("ffw", "w_embed"), "normal", "w", (2, 4)),
    "b": ParamSpec((4,), ("w_embed",), "zeros", "b", (4,)),
}


def trees(seed: int):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for k, s in SPECS.items()}


def optimizer(name: str, **keys):
    return make_optimizer(LearnerConfig(optimizer=name, **keys), 10, SPECS).transform


def walk(transform: optax.GradientTransformation, n_steps: int = 4):
    params = trees(0)
    state = transform.init(params)
    for i in range(n_steps):
        updates, state = transform.update(trees(i + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_an_optax_optimizer_follows_the_schedule_and_decays_matrices():
    got = walk(optimizer("optax:lion?b1=0.5&b2=0.9", lr=0.1, warmup_steps=3, weight_decay=0.2))
    lr = lambda k: 0.1 * jnp.minimum((k + 1) / 3, 1.0)  # noqa: E731
    want = walk(optax.lion(lr, b1=0.5, b2=0.9, weight_decay=0.2, mask={"w": True, "b": False}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


@pytest.mark.parametrize("name", ["lion", "adamw", "sgd"])
def test_the_built_in_name_and_the_import_path_take_the_same_steps(name):
    keys = dict(lr=0.1, weight_decay=0.2)
    got, want = walk(optimizer(name, **keys)), walk(optimizer(f"optax:{name}", **keys))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_a_function_of_the_user_is_loaded_from_its_file(tmp_path):
    code = "import optax\ndef double(learning_rate, by=2.0):\n"
    code += "    return optax.chain(optax.scale(by), optax.scale_by_learning_rate(learning_rate))\n"
    (tmp_path / "mine.py").write_text(code)
    got = walk(optimizer(f"{tmp_path}/mine.py:double?by=3", lr=0.1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        got,
        walk(
            optax.chain(
                optax.add_decayed_weights(0.01 / 3, {"w": True, "b": False}), optax.sgd(0.3)
            )
        ),
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optax:lyon", r"no function or class 'lyon'; set one that it has: .*lion"),
        ("optaxx:lion", "optaxx cannot be imported"),
        ("optax:lion?b3=0.9", "unknown option 'b3'; the options are b1, b2, mu_dtype"),
        ("optax:lion?weight_decay=0.1", r"set by config\.learner\.weight_decay"),
        ("optax:adamw?b1=fast", r"cannot take a step \(TypeError"),
        ("optax:clip", r"has the parameters max_delta; name one with the parameter learning_rate"),
        ("optax.contrib:momo", r"cannot take a step"),
    ],
)
def test_what_cannot_work_is_an_error_before_device_work(name, message):
    with pytest.raises(ValueError, match=message) as error:
        optimizer(name)
    assert len(str(error.value)) < 900

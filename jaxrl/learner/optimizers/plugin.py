"""Optimizers by import path: optax's, and the user's own."""

import inspect

import jax
import jax.numpy as jnp
import optax

from jaxrl.config.plugins import load_plugin, options
from jaxrl.config.schema import did_you_mean
from jaxrl.config.user_code import user_frames
from jaxrl.models.spec import map_specs
from jaxrl.types import Tree

KEY = "config.learner.optimizer"
OF_LEARNER = {  # options that are keys of the learner
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "mask": "weight_decays",
}


def load_optimizer(
    spec: str, lr: optax.Schedule, specs: Tree
) -> optax.GradientTransformationExtraArgs:
    """The transformation of "package.module:function?option=value&...".

    The function has the parameter `learning_rate`, to which the schedule is passed. Its own weight
    decay is 0, since config.learner.weight_decay is added to every optimizer. Raises ValueError if
    it does not exist, has no such option, or cannot take a step.
    """
    given = options(spec)
    function = load_plugin(spec, built_in={}, key=KEY, reserved=given)
    parameters = inspect.signature(function).parameters
    if "learning_rate" not in parameters:
        raise ValueError(
            f"{KEY}={spec!r}: the function has the parameters {', '.join(parameters) or 'none'}; "
            "name one with the parameter learning_rate"
        )
    for option in given:
        if option in OF_LEARNER:
            raise ValueError(
                f"{KEY}={spec!r}: {option} is set by config.learner.{OF_LEARNER[option]}; remove "
                "the option"
            )
        if option not in parameters:
            hint = did_you_mean(option, parameters)
            known = ", ".join(name for name in parameters if name not in OF_LEARNER)
            raise ValueError(
                f"{KEY}={spec!r} has the unknown option {option!r}; {hint}the options are {known}"
            )
    if "weight_decay" in parameters:
        given["weight_decay"] = 0.0
    shapes = map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
    try:
        transform = optax.with_extra_args_support(function(learning_rate=lr, **given))
        jax.eval_shape(lambda p: transform.update(p, transform.init(p), p), shapes)
    except Exception as error:  # foreign code
        raise ValueError(
            f"{KEY}={spec!r} cannot take a step ({type(error).__name__}: {error}); correct its "
            f"options, or set another optimizer{user_frames(error)}"
        ) from error
    return transform

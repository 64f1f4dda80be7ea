"""Checks of the rows that a user gives as "file.py:ROW", before the first step.

A built-in row is checked against the other keys of a run by its name
(jaxrl/config/preconditions.py). A row of the user is checked by what it declares, and called once:
an advantage on small arrays, the others on shapes.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.advantages import ADVANTAGES, Advantage
from jaxrl.algorithms.kl import KL_ESTIMATORS
from jaxrl.algorithms.losses.aggregation import AGGREGATIONS
from jaxrl.algorithms.losses.importance import CORRECTIONS
from jaxrl.algorithms.losses.policy_loss import POLICY_LOSSES
from jaxrl.algorithms.losses.rejection import REJECTIONS
from jaxrl.algorithms.table import Row, apply, lookup
from jaxrl.config.choices import RESPONSE_LOSSES
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.config.schema import is_import_path
from jaxrl.config.user_code import error_text

TABLES: dict[str, Mapping[str, Any]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "kl": KL_ESTIMATORS,
    "correction": CORRECTIONS,
    "rejection": REJECTIONS,
}
AGGREGATION_INPUTS = ("loss", "mask", "response_len", "max_response_len")
P, N_SAMPLES, T = 3, 2, 4  # prompts, samples of a prompt, and tokens of the trial arrays


def check_user_rows(run: RunConfig) -> None:
    """Loads the user's rows of `run.algorithm` and calls each once.

    Raises ValueError with one line per row that does not fit its table or the other keys.
    """
    errors = [
        f"config.algorithm.{key} = {spec!r}: {line}"
        for key, table in TABLES.items()
        if is_import_path(spec := getattr(run.algorithm, key))
        for line in _errors(key, lookup(table, spec, f"algorithm.{key}"), run)
    ]
    if errors:
        raise ValueError("\n".join(errors))


def _errors(key: str, row: Any, run: RunConfig) -> list[str]:
    if key == "aggregation":
        inputs, trial = AGGREGATION_INPUTS, _call_aggregation
        errors = list(_signature_errors(row.function, inputs, ()))
    else:
        trial = _call_advantage if key == "advantage" else _call_per_token
        errors = [*_input_errors(row, TABLES[key]), *_row_errors(row)]
    if isinstance(row, Advantage):
        errors += _advantage_errors(row, run)
    if key == "kl" and run.algorithm.kl_in == "reward" and set(row.inputs) - {"logp", "ref_logp"}:
        errors.append("a KL in the reward reads logp and ref_logp only; set algorithm.kl_in='loss'")
    return errors or _trial_errors(trial, row, run.algorithm)


def _input_errors(row: Row, table: Mapping[str, Row]) -> Iterator[str]:
    known = {name for other in table.values() for name in other.inputs}
    if unknown := [name for name in row.inputs if name not in known]:
        yield f"unknown inputs {', '.join(unknown)}; the inputs are {', '.join(sorted(known))}"
    if "selected" in row.inputs and getattr(row, "selection", None) is None:
        yield "the input 'selected' needs a selection, SELECT_BETWEEN or SELECT_LARGEST"


def _row_errors(row: Row) -> Iterator[str]:
    fields = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    if unknown := [name for name in row.hyper_parameters if name not in fields]:
        yield (
            f"{', '.join(unknown)} in hyper_parameters is no key of config.algorithm; give a "
            "constant of the function as an option, as in 'file.py:ROW?beta=0.1'"
        )
    yield from _signature_errors(row.function, row.inputs, row.hyper_parameters)


def _signature_errors(function: Any, inputs: Any, hyper_parameters: Any) -> Iterator[str]:
    """Errors of a function that is called with positional inputs and keyword hyper-parameters."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    required = {name for name, default in keywords.items() if default is inspect.Parameter.empty}
    if positional != list(inputs):
        yield f"the function takes ({', '.join(positional)}), not the inputs ({', '.join(inputs)})"
    if missing := sorted(required - set(hyper_parameters)):
        yield f"{', '.join(missing)} has no value; name it in hyper_parameters, or as an option"
    if extra := [name for name in hyper_parameters if name not in keywords]:
        yield f"the function has no keyword-only argument {', '.join(extra)}"


def _advantage_errors(row: Advantage, run: RunConfig) -> Iterator[str]:
    algorithm = run.algorithm
    if row.needs_critic:
        yield "needs_critic is not supported here; set algorithm.advantage='gae' for a critic"
    if row.needs_group and run.rollout.n == 1:
        yield "it compares the samples of a prompt, but rollout.n=1; set rollout.n to 2 or more"
    if row.level == "token" and algorithm.policy_loss in RESPONSE_LOSSES:
        yield (
            f"algorithm.policy_loss={algorithm.policy_loss!r} has one ratio per response and would "
            "average its advantages per token; set algorithm.policy_loss='gspo_token'"
        )
    if algorithm.gamma != 1.0 and "gamma" not in row.hyper_parameters:
        yield f"algorithm.gamma={algorithm.gamma} has no effect; set 1.0, or name it in the row"


def _trial_errors(trial: Any, row: Any, cfg: AlgorithmConfig) -> list[str]:
    try:
        return trial(row, cfg)
    except Exception as error:  # the user's code
        return [f"a call raises {error_text(error)}"]


def _call_per_token(row: Row, cfg: AlgorithmConfig) -> list[str]:
    names = ("log_ratio", "logp", "ref_logp", "behavior_logp", "advantages", "exact_kl", "mask")
    inputs = {name: _abstract((2, T)) for name in names}
    inputs |= {"segments": _abstract((2, T), jnp.int32), "selected": _abstract((2, T), jnp.bool_)}
    result = jax.eval_shape(lambda inputs: apply(row, inputs, cfg), inputs)
    return _shape_errors(result, (2, T), "[B, T]")


def _call_aggregation(row: Any, cfg: AlgorithmConfig) -> list[str]:
    per_token = [_abstract((2, T))] * 3
    result = jax.eval_shape(lambda *arrays: row.function(*arrays, T), *per_token)
    if not isinstance(result, tuple) or len(result) != 2:
        return ["returns no (sum, weight)"]
    return [line for part in result for line in _shape_errors(part, (), "a scalar")]


def _call_advantage(row: Advantage, cfg: AlgorithmConfig) -> list[str]:
    groups, n = (P, N_SAMPLES), P * N_SAMPLES
    inputs = {"rewards": _values(0, groups), "lengths": np.full(groups, T)}
    inputs |= {name: _values(1, (n,)) for name in ("task_rewards", "baselines")}
    inputs |= {name: _values(2, (n, T)) for name in ("token_rewards", "token_kl_rewards", "values")}
    inputs["mask"] = np.ones((n, T), np.float32)
    inputs |= {"task_groups": _values(0, groups), "kl_penalties": _values(4, groups)}
    inputs |= {"role_rewards": _values(5, (n,)), "role_baselines": _values(6, (n,))}
    inputs["roles"] = ("policy",) * n
    inputs["score_norms"] = np.ones((n, T), np.float32)
    inputs |= {"reward_parts": _values(3, (2, *groups)), "reward_weights": np.ones(2)}
    result = apply(row, inputs, cfg)
    shape, text = (groups, "[P, n]") if row.level == "response" else ((n, T), "[N, T]")
    if errors := _shape_errors(result, shape, text):
        return errors
    finite = np.isfinite(np.asarray(result, np.float64)).all()
    return [] if finite else ["returns NaN or infinity on small arrays"]


def _abstract(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array without values: the devices are not opened yet."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _values(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, shape).astype(np.float32)


def _shape_errors(result: Any, shape: tuple[int, ...], text: str) -> list[str]:
    found = getattr(result, "shape", None)
    shown = type(result).__name__ if found is None else found
    return [] if found == shape else [f"returns {shown}, not {text} = {shape}"]

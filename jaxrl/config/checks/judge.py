"""Rules between the keys of judges, on a server and on the devices of the run."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from jaxrl.config.keys import JudgeConfig, RunConfig
from jaxrl.config.packages import install_advice
from jaxrl.config.plugins import options
from jaxrl.config.schema import changed_keys, to_dict

_JUDGES = ("judge", "judge_pairs")
_OF_PAIRS = (".against", ".opponents", ".swap")
_OF_CHECKPOINTS = (".path", ".dtype", ".chat_template", ".max_num_seqs", ".n_pages")
_JUDGE_EXAMPLES = {
    "url": "http://judge:8000/v1",
    "model": "Qwen/Qwen3-32B",
    "rubric": "rubric.yaml",
}
_SERVE = (
    "serve the judge with `python -m jaxrl.serve` on other devices and set "
    "reward.judge.weights='server' and reward.judge.url"
)


def judge_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    judge, errors = run.reward.judge, []
    judges = [f for f in run.reward.functions if f.partition("?")[0] in _JUDGES]
    changed = changed_keys("reward.judge", judge, JudgeConfig())
    if changed and not judges:
        return [
            f"{', '.join(changed)} but reward.functions={run.reward.functions} has no 'judge' or "
            "'judge_pairs'; add one, or omit these keys"
        ]
    only_pairs = [text for text in changed if text.split("=")[0].endswith(_OF_PAIRS)]
    if only_pairs and not any(f.startswith("judge_pairs") for f in judges):
        errors.append(
            f"{', '.join(only_pairs)} but reward.functions={run.reward.functions} has no "
            "'judge_pairs'; add it, or omit these keys"
        )
    own = [text for text in changed if text.split("=")[0].endswith(_OF_CHECKPOINTS)]
    if own and judge.weights != "checkpoint":
        errors.append(
            f"{', '.join(own)} but reward.judge.weights={judge.weights!r} reads no checkpoint; set "
            "it to 'checkpoint', or omit these keys"
        )
    if judge.is_local:
        errors += _device_errors(run)
    elif judge.max_prompt_len:
        errors.append(
            f"reward.judge.max_prompt_len={judge.max_prompt_len} is for a judge on the run's "
            "devices; set reward.judge.weights='reference', 'policy' or 'checkpoint', or omit it"
        )
    for function in judges:
        given = {"url": judge.url, "model": judge.model, "rubric": judge.rubric} | options(function)
        errors += [
            f"reward.functions has {function!r} but reward.judge.{name} is empty; set it, for "
            f"example {_JUDGE_EXAMPLES[name]!r}"
            for name in _JUDGE_EXAMPLES
            if not given[name] and (name == "rubric" or not judge.is_local)
        ]
        if given["url"] and not str(given["url"]).startswith(("http://", "https://")):
            errors.append(
                f"reward.judge.url={given['url']!r} is no URL; set one such as "
                f"{_JUDGE_EXAMPLES['url']!r}"
            )
        if function.partition("?")[0] == "judge_pairs":
            errors += _pair_errors(run, to_dict(judge) | options(function))
    return errors


def _pair_errors(run: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """Rules of the comparison of pairs, with the keys and options `given`."""
    errors = []
    if given["opponents"] % 2:
        errors.append(
            f"reward.judge.opponents={given['opponents']} is odd; set an even number, half of it "
            "on each side of a response, or 0 for all others"
        )
    if given["against"] == "reference":
        if not given["reference"]:
            errors.append(
                "reward.judge.against='reference' but reward.judge.reference is empty; set it to "
                "'answer' or a column of the data"
            )
        return errors
    sizes = {"rollout.n": run.rollout.n}
    if run.data.val:
        sizes["eval.n"] = run.eval.n
    if run.algorithm.advantage == "remax":
        sizes["the greedy baseline of algorithm.advantage='remax'"] = 1
    errors += [
        f"{name}={n} gives judge_pairs no opponent; set at least 2, or "
        "reward.judge.against='reference'"
        for name, n in sizes.items()
        if n < 2
    ]
    return errors


def evaluation_judge_errors(run: RunConfig) -> list[str]:
    """A judge on the devices of a run that does not train."""
    weights = run.reward.judge.weights
    if not run.reward.judge.is_local:
        return []
    return [f"reward.judge.weights={weights!r} is for training; in jaxrl.evaluate {_SERVE}"]


def _device_errors(run: RunConfig) -> list[str]:
    """Rules of a judge on the run's devices."""
    judge, errors = run.reward.judge, []
    key = f"reward.judge.weights={judge.weights!r}"
    if not judge.max_prompt_len:
        errors.append(
            f"{key} but reward.judge.max_prompt_len=0; set the tokens that rubric, conversation "
            f"and responses may take, for example {2 * run.data.max_len + 512}"
        )
    if judge.url or judge.model:
        errors.append(f"{key} reads no reward.judge.url and model; omit them, or the weights")
    if importlib.util.find_spec("llguidance") is None:
        errors.append(f"{key} needs the package llguidance: {install_advice('grammar')}")
    needs: dict[str, tuple[Any, Any]] = {
        "schedule.mode": (run.schedule.mode, "sync"),
        "schedule.rollout_workers": (run.schedule.rollout_workers, 0),
    }
    if judge.on_own_engine:
        needs |= {
            "rollout.release_kv": (run.rollout.release_kv, False),
            "learner.offload": (run.learner.offload, ()),
        }
    errors += [
        f"{key} needs the engine and its weights while rewards are computed, which "
        f"{name}={value!r} does not leave; set {name}={needed!r}, or {_SERVE}"
        for name, (value, needed) in needs.items()
        if value != needed
    ]
    if judge.weights == "checkpoint":
        return [*errors, *_checkpoint_errors(run)]
    return [*errors, *_reference_errors(run)] if judge.weights == "reference" else errors


def _checkpoint_errors(run: RunConfig) -> list[str]:
    """Rules of a judge with a separate model."""
    judge, errors = run.reward.judge, []
    if not judge.path:
        errors.append(
            "reward.judge.weights='checkpoint' but reward.judge.path is empty; set the folder or "
            "hub id of the judge's model"
        )
    needed = -(-judge.max_len // run.rollout.page_len)
    if 0 < judge.n_pages < needed:
        errors.append(
            f"reward.judge.n_pages={judge.n_pages} holds no request and verdict of "
            f"{judge.max_len} tokens (reward.judge.max_prompt_len + max_verdict_len) in pages of "
            f"rollout.page_len={run.rollout.page_len}; set at least {needed}, or 0"
        )
    return errors


def _reference_errors(run: RunConfig) -> list[str]:
    """Rules of a judge with the initial weights."""
    algorithm, lora = run.algorithm, run.lora
    key = "reward.judge.weights='reference'"
    if algorithm.teacher:
        return [
            f"{key} is the initial policy, not algorithm.teacher={algorithm.teacher!r}; {_SERVE}"
        ]
    if lora.rank:
        if lora.dora or lora.init == "pissa":
            return [
                f"{key} reads the base without adapters, which is not the initial model with "
                f"lora.dora={lora.dora}, lora.init={lora.init!r}; {_SERVE}"
            ]
        return []
    if not algorithm.has_kl or run.self_distillation.context:
        return [
            f"{key} needs initial weights, which this run does not keep; set "
            f"algorithm.kl_coef above 0 (it is {algorithm.kl_coef}), train adapters (lora.rank), "
            f"or {_SERVE}"
        ]
    sizes = {name: getattr(run.ref, name) for name in ("stage", "sequence", "tensor")}
    if other := {f"ref.{k}": n for k, n in sizes.items() if n not in (0, getattr(run.mesh, k))}:
        return [
            f"{key} reads the reference in the sharding of training, but the run sets "
            f"{', '.join(f'{name}={n}' for name, n in other.items())}; set 0, or {_SERVE}"
        ]
    if algorithm.ref_refresh_every:
        return [
            f"{key} with algorithm.ref_refresh_every={algorithm.ref_refresh_every} would judge by "
            "weights that change; set it to 0, or reward.judge.weights='policy'"
        ]
    return []

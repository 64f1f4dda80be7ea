"""The keys of a run as text: what --config.help prints."""

from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import Key, keys

USAGE = (
    "usage: python -m jaxrl.train --config=FILE.py[:ARGUMENT] [--config.KEY=VALUE ...]; "
    "--config.help lists the keys"
)

HEADINGS = {
    "": "The run",
    "model": "model",
    "lora": "lora: low-rank adapters",
    "distributed": "distributed: several processes, one per host",
    "mesh": "mesh: how devices shard the model and the batch",
    "score": "score: mesh for scoring before the updates, if it differs",
    "ref": "ref: mesh for scoring by the reference model, if it differs",
    "data": "data",
    "rollout": "rollout: the generation engine",
    "rollout.sampling": "rollout.sampling: sampling of training responses",
    "schedule": "schedule: how generation and training alternate",
    "algorithm": "algorithm",
    "self_distillation": "self_distillation: a teacher that is a model of the run",
    "teacher_endpoint": "teacher_endpoint: a teacher at a server",
    "learner": "learner: the update",
    "critic": "critic: for algorithm.advantage = gae",
    "critic.mesh": "critic.mesh: mesh of the critic, if it differs",
    "preference": "preference: jaxrl.dpo and jaxrl.reward_model",
    "reward": "reward: reward functions",
    "reward.judge": "reward.judge: a language model that judges by a rubric",
    "env": "env: environments for multi-turn rollouts",
    "reward_model": "reward_model: a model that scores responses",
    "reward_model.mesh": "reward_model.mesh: mesh of the reward model, if it differs",
    "eval": "eval: validation",
    "eval.sampling": "eval.sampling: sampling of validation responses",
    "checkpoint": "checkpoint",
    "log": "log",
    "profile": "profile",
}


def help_text() -> str:
    """Every key with its default, type, allowed values and meaning."""
    lines = [USAGE, "", "Every key, with its default. Tuples as a,b or as ('a', 'b'); () is empty."]
    for section, specs in sections().items():
        lines += ["", HEADINGS[section]]
        for spec in specs:
            allowed = f", {spec.range}" if spec.range else ""
            lines += [f"  --config.{spec.name}={default(spec)}  ({spec.type_name}{allowed})"]
            lines += [f"      {spec.doc}"]
    return "\n".join(lines)


def sections() -> dict[str, list[Key]]:
    """The keys of each section; nested sections follow the section that contains them."""
    found: dict[str, list[Key]] = {section: [] for section in HEADINGS}
    for name, spec in keys(RunConfig).items():
        found[name.rpartition(".")[0]].append(spec)
    return found


def default(spec: Key) -> str:
    """The default as written on the command line."""
    if isinstance(spec.default, tuple):
        return ",".join(map(str, spec.default)) or "()"
    return str(spec.default) if spec.default != "" else "''"

"""The commands of `jaxrl`: each one is a program `python -m MODULE`. Imports nothing heavy."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """One program."""

    module: str
    summary: str  # its line of `jaxrl --help`
    # "module:name" of a function that returns its argparse parser, or of a text that has the
    # options at the beginning of lines; "" if it has those of `config` only.
    options: str = ""
    config: tuple[str, ...] = ("--config=", "--config.")  # of FILE.py, and of KEY=VALUE


COMMANDS = {
    "train": EntryPoint("jaxrl.train", "reinforcement learning"),
    "sft": EntryPoint("jaxrl.sft", "supervised fine-tuning on conversations"),
    "dpo": EntryPoint("jaxrl.dpo", "DPO, SimPO, ORPO, CPO, KTO and others on preferences"),
    "reward-model": EntryPoint("jaxrl.reward_model", "train a reward model on pairs"),
    "evaluate": EntryPoint(
        "jaxrl.evaluate",
        "reward and pass@k of a model, with standard errors",
        "jaxrl.config.arguments.evaluate:HELP",
    ),
    "serve": EntryPoint(
        "jaxrl.serve", "OpenAI-compatible server for one model", "jaxrl.serve.options:arguments"
    ),
    "api": EntryPoint(
        "jaxrl.api", "training API of the package tinker", "jaxrl.api.options:arguments"
    ),
    "plan": EntryPoint(
        "jaxrl.plan",
        "memory and time of a run on devices that need not be attached",
        "jaxrl.planner.options:HELP",
    ),
    "doctor": EntryPoint(
        "jaxrl.doctor",
        "check devices, versions, kernels and disks; a table for a bug report",
        "jaxrl.doctor.arguments:parser",
        config=(),
    ),
    "convert": EntryPoint(
        "jaxrl.convert",
        "a model or a checkpoint as a Hugging Face folder",
        "jaxrl.config.arguments.convert:parser",
        config=(),
    ),
    "check-model": EntryPoint(
        "jaxrl.check_model",
        "load a model; check its logits, export and engine",
        "jaxrl.config.arguments.check_model:parser",
        config=(),
    ),
    "report": EntryPoint(
        "jaxrl.report",
        "write report.html of a run folder, or serve it during the run",
        "jaxrl.report.__main__:parser",
        config=(),
    ),
    "launch": EntryPoint(
        "jaxrl.launch", "one training process per host of a Ray cluster", "jaxrl.launch:parser"
    ),
    "migrate-config": EntryPoint(
        "jaxrl.migrate",
        "a run of verl, OpenRLHF or TRL as a config file",
        "jaxrl.migrate.__main__:parser",
        config=("--config.",),
    ),
}

"""The page of the keys of verl, OpenRLHF, TRL, prime-rl and Tunix, with the key here for each.

python -m scripts.pages.keys > docs/reference/keys.md
"""

import itertools

from jaxrl.config.keys import RunConfig
from jaxrl.config.other_frameworks import Counterpart, table
from jaxrl.config.schema import keys

INTRODUCTION = """\
# Coming from verl, OpenRLHF, TRL, prime-rl or Tunix

This page has the jaxrl key for each key of verl 0.9.1, OpenRLHF 0.11.2, TRL 1.16, prime-rl 0.8 and
Tunix 0.1.7, and for names of their earlier versions. On the command line and in a config file such
a key is answered with its row. [config.md](config.md) has every key with its default. "Not needed"
means that it always happens, or that there is nothing to choose; "not yet" means that it is
missing. `*` stands for any text: such a row is for the names that no other row has. `python -m
jaxrl.migrate FILE` (a launch script or a YAML file of verl, OpenRLHF or TRL) writes the config file
for you and lists what has no counterpart. The page is generated from
`jaxrl/config/other_frameworks.tsv` by `python -m scripts.pages.keys > docs/reference/keys.md`;
`tests/migrate/keys/` has the names that the packages define.

Three differences explain most rows:

- **Trainer and engine are one program.** The policy that generates is the one that trains, on the
  same devices. Both use the same arrays; weights that training shards differently are copied on
  device for the time of a rollout. So there are no keys for weight synchronization. The pages of
  the KV cache stay allocated during updates unless `rollout.release_kv` is set:
  `rollout.memory_utilization` leaves room for both.
- **Batches are always packed.** Sequences of any length share rows. A micro-batch has a number of
  tokens per data-parallel rank, never a number of sequences, and gradient accumulation follows from
  it.
- **Loss and gradient do not depend on the layout.** Mesh, packing and token budget change only
  speed and memory.
"""

NOTES = {
    "verl, SFT": "Keys of `verl.trainer.sft_trainer`; the others are above. The programs are "
    "`jaxrl.sft`, `jaxrl.dpo` and `jaxrl.reward_model` ([offline.md](../how_to/offline.md), "
    "[rewards.md](../how_to/rewards.md)). `python -m jaxrl.evaluate` "
    "([evaluation.md](../how_to/evaluation.md)) replaces `verl.trainer.main_eval` and its "
    "generation step.",
    "OpenRLHF": "Dotted names are those of versions since 0.10; names with underscores are those "
    "before.",
    "OpenRLHF, SFT, DPO and reward models": "Keys of `openrlhf.cli.train_sft`, "
    "`openrlhf.cli.train_dpo` and `openrlhf.cli.train_rm`; the others are above.",
    "prime-rl": "Keys of `rl`; those of `sft` lack `trainer.`. `[]` stands for an entry of a list. "
    "Its TOML files are not read by `python -m jaxrl.migrate`.",
    "Tunix": "Fields of `GRPOConfig`, `DAPOConfig`, `DrGRPOConfig`, `PPOConfig`, `RolloutConfig`, "
    "`RLTrainingConfig`, `ClusterConfig` and `DPOTrainingConfig`. Its scripts are not read by "
    "`python -m jaxrl.migrate`.",
    "other names": "Common names of settings in other trainers, engines and papers.",
    "TRL": "Arguments of `GRPOConfig`, `RLOOConfig`, `SFTConfig`, `DPOConfig`, `KTOConfig`, "
    "`RewardConfig` and `ModelConfig`, and those of transformers' `TrainingArguments`.",
}


def markdown() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for framework, rows in itertools.groupby(table(), lambda row: row.framework):
        parts.append(f"\n## {framework}\n\n")
        if framework in NOTES:
            parts.append(NOTES[framework] + "\n\n")
        parts.append(f"| {framework.partition(',')[0]} | jaxrl | remarks |\n|---|---|---|\n")
        parts += [_line(row) for row in rows]
    alone = [f"`{name}`" for name in without_counterpart()]
    listed = ",\n".join(alone)  # one per line, so that changes of two branches merge
    parts.append(f"\n## Keys without a counterpart\n\n{listed}.\n")
    return "".join(parts)


def without_counterpart() -> list[str]:
    """The keys here that no row leads to."""
    led_to = {name for row in table() for name in row.ours}
    return [name for name in keys(RunConfig) if name not in led_to]


def _line(row: Counterpart) -> str:
    theirs, ours = (", ".join(f"`{name}`" for name in names) for names in (row.names, row.ours))
    return f"| {theirs} | {ours} | {row.remark} |\n"


if __name__ == "__main__":
    print(markdown(), end="")

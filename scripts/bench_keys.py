"""Measures the CPU time of an update with keys of the config, relative to one without them.

    python scripts/bench_keys.py --model MODEL_FOLDER --cores 1 \\
        --workload prompts=2,n=2,prompt=96,response=160,steps=4 \\
        --token-budget 512 --halvings 0 --remat full --set model.layers=stacked \\
        learner.offload=optimizer "learner.optimizer=muon learner.moment_dtype=int8"

A row of the printed Markdown table is a set of keys, separated by spaces. The options are those of
scripts/bench_step.py and hold for all rows; responses are random and no reference is scored. After
--warm steps, updates without and with the keys of a row alternate on the same batches, so that
other work on the machine slows both down. `ratio` is the median over pairs, with its range.
"""

import copy
import statistics
from collections.abc import Iterator

from bench_step import Trainer, make_config, make_parser, pin, read_workload


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="+", metavar="KEYS", help="keys of a row: 'KEY=VALUE ...'")
    parser.set_defaults(kl_coef=0.0, skip_gen=True)
    args = parser.parse_args()
    pin(args.cores)

    import jax  # after the cores are set

    from sharding import make_mesh

    steps = read_workload(args.workload)["steps"][: args.steps]
    print("| keys | CPU s without | CPU s with | difference | ratio |\n|---|---|---|---|---|")
    with jax.set_mesh(make_mesh(fsdp=-1)):
        without = trainer_of(args, "", steps)
        for row in args.rows:
            with_keys = trainer_of(args, row, steps)
            pairs = list(alternate(without, with_keys, steps))[args.warm :]
            del with_keys
            print(f"| `{row}` | {summary(pairs)} |", flush=True)


def trainer_of(args, row: str, steps: list[dict]) -> Trainer:
    args = copy.copy(args)
    args.set = [*args.set, *row.split()]
    return Trainer(args, make_config(args, {"steps": steps}), len(steps))


def alternate(a: Trainer, b: Trainer, steps: list[dict]) -> Iterator[tuple[float, float]]:
    """CPU seconds of the updates of each step."""
    for i, work in enumerate(steps):
        for trainer in (a, b):
            trainer.step(i, work)
        yield a.clock.seconds["update"][-1][1], b.clock.seconds["update"][-1][1]


def summary(pairs: list[tuple[float, float]]) -> str:
    """The cells of a row."""
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    difference = statistics.median(b - a for a, b in pairs)
    ratios = [b / a for a, b in pairs]
    cells = (f"{before:.1f}", f"{after:.1f}", f"{difference:+.1f}")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{' | '.join(cells)} | {statistics.median(ratios):.2f} ({spread})"


if __name__ == "__main__":
    main()

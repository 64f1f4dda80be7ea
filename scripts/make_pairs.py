"""Writes preference pairs of sums, for configs/dpo_smollm2.py and configs/reward_model_smollm2.py.

    uv run python scripts/make_pairs.py --output=data/pairs

The chosen answer is right and the rejected one is off by 1 to 9.
"""

import argparse
import json
import random
from pathlib import Path


def pairs(n: int, seed: int) -> list[dict[str, str]]:
    """`n` rows with the columns prompt, chosen and rejected."""
    rng, rows = random.Random(seed), []
    for _ in range(n):
        a, b, error = rng.randrange(10, 100), rng.randrange(10, 100), rng.randrange(1, 10)
        prompt = f"What is {a} + {b}? Answer with the number only."
        rows.append({"prompt": prompt, "chosen": str(a + b), "rejected": str(a + b + error)})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    for name, n, seed in (("train", 2048, 0), ("val", 64, 1)):
        rows = "".join(json.dumps(row) + "\n" for row in pairs(n, seed))
        (output / f"{name}.jsonl").write_text(rows)


if __name__ == "__main__":
    main()

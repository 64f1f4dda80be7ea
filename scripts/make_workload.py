"""Writes a workload for scripts/bench_engine.py: random prompts, random response lengths.

    python scripts/make_workload.py --out long.json --prompts 128 --samples 8 --mean-len 14000 \\
        --max-len 28672

The lengths imitate a reasoning model with a length limit: log-normal, truncated at --max-len, with
mean --mean-len after truncation. With --sigma 0.8 and a mean of half the limit, a seventh of the
responses are truncated.
"""

import argparse
import json
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--prompts", type=int, required=True, help="prompts per step")
    parser.add_argument("--samples", type=int, default=1, help="responses per prompt")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of every prompt")
    parser.add_argument(
        "--mean-len", type=float, required=True, help="mean response length in tokens"
    )
    parser.add_argument(
        "--max-len", type=int, required=True, help="maximum response length in tokens"
    )
    parser.add_argument(
        "--sigma", type=float, default=0.8, help="standard deviation of the logarithm of the length"
    )
    parser.add_argument(
        "--vocab", type=int, default=32_000, help="prompts use token ids below this"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    steps = [step(rng, args) for _ in range(args.steps)]
    Path(args.out).write_text(json.dumps({"config": vars(args), "steps": steps}))
    found = np.array([one["resp_len"] for one in steps])
    truncated = np.mean(found == args.max_len)
    print(
        f"{found.size} responses: mean {found.mean():.0f}, longest {found.max()}, "
        f"truncated {truncated:.0%}, tokens {found.sum()}"
    )


def step(rng: np.random.Generator, args: argparse.Namespace) -> dict:
    prompts = rng.integers(0, args.vocab, (args.prompts, args.prompt_len))
    shape = args.prompts, args.samples
    found = lengths(rng, shape, mean=args.mean_len, longest=args.max_len, sigma=args.sigma)
    return {"prompts": [{"ids": row.tolist()} for row in prompts], "resp_len": found.tolist()}


def lengths(
    rng: np.random.Generator, shape: tuple[int, ...], *, mean: float, longest: int, sigma: float
) -> np.ndarray:
    """Log-normal numbers, truncated at `longest`, with this mean.

    Raises ValueError if the mean is not between 1 and `longest`.
    """
    if not 1 < mean < longest:
        raise ValueError(f"a mean of {mean} is not between 1 and the longest of {longest} tokens")
    shapes = np.exp(sigma * rng.standard_normal(shape))
    low, high = 0.0, 1.0
    while np.minimum(high * shapes, longest).mean() < mean:
        high *= 2
    for _ in range(60):  # the mean after truncation grows with the factor
        middle = (low + high) / 2
        below = np.minimum(middle * shapes, longest).mean() < mean
        low, high = (middle, high) if below else (low, middle)
    return np.maximum(np.round(np.minimum(high * shapes, longest)), 1).astype(int)


if __name__ == "__main__":
    main()

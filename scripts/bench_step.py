"""Warm speed of one GRPO step on a given workload: generation, reference scoring, update, whole step.

    python scripts/bench_step.py --model MODEL_FOLDER --workload WORKLOAD.json --out result.json

The workload is a JSON object {"steps": [{"prompts": [{"ids": [...]}], "resp_len": [[...]]}]}: per step the prompt
tokens and the length that every response must have, so that each system does the same work. Only these
tokens count: response tokens for gen, prompt and response tokens for score, update and step. `--cores 1`
keeps all threads on one core; tokens per CPU-second are then comparable on a machine that is shared.
Prints one JSON line (medians over the steps after --warm).
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PHASES = ("gen", "score", "update", "step")


def main() -> None:
    args = parse_args()
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.cores :])
    result = bench(args)
    line = json.dumps(result)
    if args.out:
        Path(args.out).write_text(line + "\n")
    print(line)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face model folder")
    parser.add_argument("--workload", required=True, help="JSON file of prompts and lengths")
    parser.add_argument("--out", default="", help="file for the JSON line")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm", type=int, default=1, help="first steps that do not count")
    parser.add_argument("--cores", type=int, default=0, help="pin to so many cores; 0 = all")
    parser.add_argument("--token-budget", type=int, default=1024, help="learner.token_budget")
    parser.add_argument("--remat", default="none", help="learner.remat")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kl-coef", type=float, default=0.04, help="0 leaves the scoring out")
    return parser.parse_args()


class Clock:
    """Wall and CPU seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[tuple[float, float, int]]] = {name: [] for name in PHASES}

    @contextmanager
    def phase(self, name: str, n_tokens: int) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        spent = time.perf_counter() - wall, time.process_time() - cpu, n_tokens
        self.seconds[name].append(spent)

    def report(self, warm: int) -> dict[str, dict[str, float]]:
        out = {}
        for name, all_steps in self.seconds.items():
            if steps := all_steps[warm:]:
                out[name] = {
                    "tokens_per_s": round(statistics.median(n / w for w, _, n in steps), 2),
                    "tokens_per_cpu_s": round(statistics.median(n / c for _, c, n in steps), 2),
                    "wall_s": round(statistics.median(w for w, _, _ in steps), 4),
                    "cpu_s": round(statistics.median(c for _, c, _ in steps), 4),
                }
        return out


def bench(args: argparse.Namespace) -> dict:
    import jax  # after the cores are chosen

    from jaxrl.data.packing import Packed, empty_batch
    from jaxrl.engine.engine import PagedEngine
    from jaxrl.learner.optimizer import make_optimizer
    from jaxrl.learner.state import init_state
    from jaxrl.learner.step import make_score, make_update
    from jaxrl.models.decoder import decoder_specs
    from jaxrl.models.files.hf_load import load_model
    from jaxrl.rollout.generate import generate
    from jaxrl.runtime.host_memory import keep_freed_memory
    from jaxrl.trainer.experience import make_mini_batches, to_sample
    from jaxrl.types import Prompt
    from sharding import copy_tree, make_mesh
    from sharding.rules import DECODE, TRAIN

    if jax.default_backend() == "cpu":
        keep_freed_memory()
    workload = json.loads(Path(args.workload).read_text())
    steps = workload["steps"][: args.steps]
    cfg = make_config(args, workload)
    clock = Clock()
    with jax.set_mesh(make_mesh(fsdp=-1)):
        model_cfg, params = load_model(args.model, rules=TRAIN, dtype=args.dtype)
        optimizer = make_optimizer(cfg.learner, len(steps), decoder_specs(model_cfg))
        reference = copy_tree(params)
        state = init_state(params, optimizer)
        del params
        engine = PagedEngine(
            model_cfg,
            cfg.rollout,
            rules=DECODE,
            dtype=state.params.embed.dtype,
            max_len=cfg.data.max_len,
        )
        update, score = make_update(cfg, optimizer, TRAIN), make_score(cfg, TRAIN)
        engine.warmup(state.params)
        for shape in cfg.learner.shapes:
            score(reference, update.put(empty_batch(*shape)))
            state, _ = update.update(state, [empty_batch(*shape)])
        losses = []
        for i, work in enumerate(steps):
            prompts = [
                Prompt(j, (), np.array(p["ids"], np.int32), "")
                for j, p in enumerate(work["prompts"])
            ]
            lens = [n for row in work["resp_len"] for n in row]
            n_prompt = sum(len(p.tokens) for p in prompts) * cfg.rollout.n
            n_response, n_all = sum(lens), n_prompt + sum(lens)
            with clock.phase("step", n_all):
                with clock.phase("gen", n_response):
                    rollouts, stats = generate(
                        engine,
                        state.params,
                        prompts,
                        n=cfg.rollout.n,
                        sampling=cfg.rollout.sampling,
                        max_tokens=lens,
                        seed=i,
                        version=i,
                        decode=lambda tokens: "",
                        ignore_stop=True,
                    )
                rewards = np.random.default_rng(i).random(len(rollouts))

                def ref_logp(batches) -> list[np.ndarray]:
                    return [np.asarray(score(reference, update.put(b))[0]) for b in batches]

                with clock.phase("score", n_all):
                    mini_batches, packing = make_mini_batches(
                        [to_sample(r) for r in rollouts],
                        rewards,
                        cfg,
                        n_ranks=1,
                        score_old=None,
                        score_ref=ref_logp if args.kl_coef else None,
                    )
                with clock.phase("update", n_all):
                    packed: list[Packed] = mini_batches[0].packed
                    state, metrics = update.update(state, [p.batch for p in packed])
                    jax.block_until_ready(state.params)
            losses.append(metrics["loss/total"])
    return {
        "system": "jaxrl",
        "workload": workload.get("name", Path(args.workload).stem),
        "config": vars(args),
        "jax": jax.__version__,
        "phases": clock.report(args.warm),
        "padding_fraction": round(packing["perf/padding_fraction"], 4),
        "rollout": {name: round(value, 4) for name, value in stats.items()},
        "losses": losses,
        "mismatch_logp_diff_max": metrics["mismatch/logp_diff_max"],
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def make_config(args: argparse.Namespace, workload: dict):
    from jaxrl.config.resolve import default_config, resolve

    prompt_lens = [len(p["ids"]) for s in workload["steps"] for p in s["prompts"]]
    response_lens = [n for s in workload["steps"] for row in s["resp_len"] for n in row]
    first = workload["steps"][0]
    config: Any = default_config()
    config.model.path = args.model
    config.data.train = (args.workload,)
    config.data.prompts_per_step = len(first["prompts"])
    config.data.max_prompt_len, config.data.max_response_len = max(prompt_lens), max(response_lens)
    config.rollout.n = len(first["resp_len"][0])
    config.rollout.max_num_seqs = max(2, min(64, config.data.prompts_per_step * config.rollout.n))
    config.rollout.max_num_batched_tokens = 1024
    config.algorithm.kl_coef = args.kl_coef
    config.learner.token_budget = args.token_budget
    config.learner.remat = args.remat
    config.learner.lr = 1e-5
    return resolve(config)


if __name__ == "__main__":
    main()

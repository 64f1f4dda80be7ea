"""Measures one GRPO step on a fixed workload: generation, reference scoring, update, whole step.

    python scripts/bench_step.py --model MODEL_FOLDER --workload WORKLOAD.json --out result.json

The workload is a JSON object {"steps": [{"prompts": [{"ids": [...]}], "resp_len": [[...]]}]}: the
prompt tokens of each step and the length of every response, so that all systems do the same work.
Only these tokens count: response tokens for gen; prompt and response tokens of all samples for
score, update and step, although some are computed once (`--shared-prefixes`). Instead of a file,
lengths such as `prompts=8,n=8,prompt=30,response=16,steps=3` make a workload of random tokens. With
`--skip-gen` responses are random and the engine is not compiled. `--lora RANK` trains adapters on
all linear layers instead of all weights; `--merge` merges them into the weights for generation,
whose time includes the merge. `--set KEY=VALUE`, as often as needed, sets any other key of the
config, such as `--set learner.offload=optimizer`. `--trace DIR` writes a JAX trace of one more
step, which scripts/trace_kernels.py reads. With `--cores 1` all threads run on one core; tokens per
CPU-second are then comparable on a shared machine.

Prints one JSON line with medians over the steps after --warm:

    {"system": "jaxrl", "workload": ..., "phases": {"gen": {"tokens_per_s": ...,
     "tokens_per_cpu_s": ..., "wall_s": ..., "cpu_s": ...}, "score": ..., "update": ...,
     "step": ...}, "padding_fraction": ..., "rollout": ..., "losses": [...], ...}
"""

import argparse
import dataclasses
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

from jaxrl.runtime.start import set_gpu_memory

PHASES = ("gen", "score", "update", "step")


def main() -> None:
    args = make_parser(__doc__).parse_args()
    set_gpu_memory()  # before JAX starts
    pin(args.cores)
    result = bench(args)
    line = json.dumps(result)
    if args.out:
        Path(args.out).write_text(line + "\n")
    print(line)


def pin(n_cores: int) -> None:
    """Runs all threads on the last cores that the process may use; 0 = on all."""
    if n_cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-n_cores:])


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of a step; the first line of `doc` describes the program."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face model folder")
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="use random weights; --model is a config.json or a name in configs/shapes",
    )
    parser.add_argument(
        "--workload", required=True, help="JSON file of prompts and response lengths"
    )
    parser.add_argument("--out", default="", help="also write the JSON line to this file")
    parser.add_argument("--steps", type=int, default=4, help="steps to run")
    parser.add_argument("--warm", type=int, default=1, help="warm-up steps, not counted")
    parser.add_argument("--cores", type=int, default=0, help="number of cores to use; 0 = all")
    parser.add_argument("--trace", default="", metavar="DIR", help="trace one more step into DIR")
    parser.add_argument("--token-budget", type=int, default=1024, help="learner.token_budget")
    parser.add_argument("--skip-gen", action="store_true", help="random responses, no engine")
    parser.add_argument("--segment-align", type=int, default=64, help="learner.segment_align")
    parser.add_argument(
        "--shared-prefixes", default="auto", help="learner.shared_prefixes: auto, on or off"
    )
    parser.add_argument("--remat", default="none", help="learner.remat")
    parser.add_argument("--halvings", type=int, default=2, help="learner.halvings")
    parser.add_argument("--dtype", default="float32", help="dtype of the weights")
    parser.add_argument("--kl-coef", type=float, default=0.04, help="0 skips reference scoring")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 = full weights")
    parser.add_argument("--merge", action="store_true", help="with --lora: lora.merge")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="sets a key of the config"
    )
    return parser


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
    import jax  # after the cores are set

    from sharding import make_mesh

    workload = read_workload(args.workload)
    steps = workload["steps"][: args.steps]
    cfg = make_config(args, workload)
    with jax.set_mesh(make_mesh(fsdp=-1)):
        trainer = Trainer(args, cfg, len(steps))
        for i, work in enumerate(steps):
            trainer.step(i, work)
        measured = trainer.clock.report(args.warm)
        if args.trace:
            with jax.profiler.trace(args.trace):
                trainer.step(len(steps), steps[-1])
    return {
        "system": "jaxrl",
        "workload": workload.get("name", Path(args.workload).stem),
        "config": vars(args),
        "jax": jax.__version__,
        "phases": measured,
        "padding_fraction": round(trainer.packing["perf/padding_fraction"], 4),
        "shared_fraction": round(trainer.packing["perf/shared_fraction"], 4),
        "rollout": {name: round(value, 4) for name, value in trainer.stats.items()},
        "losses": trainer.losses,
        "grad_norm": trainer.metrics["optim/grad_norm"],
        "mismatch_logp_diff_max": trainer.metrics["mismatch/logp_diff_max"],
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def read_workload(source: str) -> dict:
    """The workload of a file, or random tokens of lengths such as `prompt=30,response=16`."""
    if Path(source).exists():
        return json.loads(Path(source).read_text())
    sizes = {"prompts": 8, "n": 8, "steps": 4} | {
        name: int(value) for name, value in (part.split("=") for part in source.split(","))
    }
    rng = np.random.default_rng(0)

    def step() -> dict:
        tokens = rng.integers(5, 5000, (sizes["prompts"], sizes["prompt"])).tolist()
        return {
            "prompts": [{"ids": ids} for ids in tokens],
            "resp_len": [[sizes["response"]] * sizes["n"] for _ in tokens],
        }

    return {"name": source, "steps": [step() for _ in range(sizes["steps"])]}


class Trainer:
    """Engine, learner and reference model, with all programs compiled."""

    def __init__(self, args: argparse.Namespace, cfg, n_steps: int) -> None:
        import jax

        from jaxrl.data.packing import empty_batch
        from jaxrl.engine.engine import PagedEngine
        from jaxrl.layout import rollout_layout
        from jaxrl.learner.optimizer import make_optimizer
        from jaxrl.learner.state import init_state
        from jaxrl.learner.step import make_score, make_update
        from jaxrl.models.decoder import decoder_specs
        from jaxrl.models.lora import adapters, add_adapters, split, without_adapters
        from jaxrl.runtime.flat_program import flatten
        from jaxrl.runtime.host_memory import keep_freed_memory
        from sharding import copy_tree
        from sharding.rules import DECODE, TRAIN

        if jax.default_backend() == "cpu":
            keep_freed_memory()
        self.cfg, self.scores_reference = cfg, bool(args.kl_coef)
        self.engine, self.stats = None, {}
        self.clock, self.losses = Clock(), []
        model_cfg, params = load(args, cfg)
        if lora := adapters(cfg.lora, model_cfg):
            params = add_adapters(params, lora, seed=0, rules=TRAIN, dtype=args.dtype)
            model_cfg = params.cfg
        optimizer = make_optimizer(cfg.learner, n_steps, split(decoder_specs(model_cfg))[0])
        self.reference = flatten(without_adapters(params) if lora else copy_tree(params))
        self.layout = rollout_layout(cfg, model_cfg, params.embed.dtype)
        self.state = init_state(params, optimizer, offload="optimizer" in cfg.learner.offload)
        del params
        if not args.skip_gen:
            self.engine = PagedEngine(
                model_cfg,
                cfg.rollout,
                rules=DECODE,
                dtype=self.state.params.embed.dtype,
                max_len=cfg.data.max_len,
            )
            with self.layout.weights(self.state.params) as weights:
                self.engine.warmup(weights)
        self.update, self.score = make_update(cfg, optimizer, TRAIN), make_score(cfg, TRAIN)
        for shape in cfg.learner.shapes:
            if self.scores_reference:
                self.score(self.reference, self.update.put(empty_batch(*shape)))
            self.state, _ = self.update.update(self.state, [empty_batch(*shape)])

    def step(self, i: int, work: dict) -> None:
        """Runs and times step `i` of the workload."""
        import jax

        lens = [n for row in work["resp_len"] for n in row]
        n_prompt = sum(len(p["ids"]) for p in work["prompts"]) * self.cfg.rollout.n
        n_response, n_all = sum(lens), n_prompt + sum(lens)
        with self.clock.phase("step", n_all):
            if self.engine is None:
                rollouts = random_rollouts(i, work, self.state.params.cfg.V)
            else:
                with self.clock.phase("gen", n_response):
                    rollouts = self.generate(self.engine, i, work, lens)
            with self.clock.phase("score", n_all):
                mini_batches = self.make_batches(i, rollouts)
            with self.clock.phase("update", n_all):
                batches = [p.batch for p in mini_batches[0].packed]
                self.state, self.metrics = self.update.update(self.state, batches)
                jax.block_until_ready(self.state.params)
        self.losses.append(self.metrics["loss/total"])

    def generate(self, engine, i: int, work: dict, lens: list[int]) -> list:
        from jaxrl.rollout.loop import SingleTurnRunner, generate, sampled_requests
        from jaxrl.types import Prompt

        rollout = self.cfg.rollout

        def make_request(group, sample):
            request = sampled_requests(rollout.sampling, lens[group.index * rollout.n + sample])
            return dataclasses.replace(request(group, sample), ignore_stop=True)

        prompts = [
            Prompt(j, (), np.array(p["ids"], np.int32), "") for j, p in enumerate(work["prompts"])
        ]
        with self.layout.weights(self.state.params) as weights:
            runner = SingleTurnRunner(engine, make_request, lambda tokens: "")
            rollouts, self.stats = generate(
                runner, weights, prompts, n=rollout.n, seed=i, version=i
            )
        return rollouts

    def make_batches(self, i: int, rollouts: list) -> list:
        """Mini-batches with random rewards and, if needed, reference logprobs."""
        from jaxrl.trainer.phases.mini_batches import make_mini_batches, to_sample, with_scores

        rewards = np.random.default_rng(i).random(len(rollouts))

        def ref_logp(batches) -> list[np.ndarray]:
            return [np.asarray(self.score(self.reference, self.update.put(b))[0]) for b in batches]

        mini_batches, self.packing = make_mini_batches(
            [to_sample(r, group=j // self.cfg.rollout.n) for j, r in enumerate(rollouts)],
            rewards,
            self.cfg,
            n_ranks=1,
        )
        score_ref = ref_logp if self.scores_reference else None
        return with_scores(mini_batches, self.cfg.algorithm, score_ref=score_ref)


def load(args: argparse.Namespace, cfg) -> tuple:
    """(the decoder's config, its weights), on the current mesh."""
    import jax

    from jaxrl.models.config import for_platform
    from jaxrl.models.decoder import init_model
    from jaxrl.models.files.hf_load import load_model, model_config
    from jaxrl.planner.model_shape import model_shape
    from sharding.rules import TRAIN

    if args.random_weights:
        shape = model_shape(args.model, option="--model")
    else:
        shape = model_config(args.model)
    stacked = for_platform(cfg, shape, jax.default_backend())[1].stacked
    if not args.random_weights:
        return load_model(args.model, rules=TRAIN, dtype=args.dtype, stacked=stacked)
    shape = dataclasses.replace(shape, stacked=stacked)
    return shape, init_model(shape, seed=0, rules=TRAIN, dtype=args.dtype)


def random_rollouts(i: int, work: dict, n_vocab: int) -> list:
    """Rollouts of random tokens with the prompts and lengths of step `i`."""
    from jaxrl.types import Prompt, Rollout

    rng, rollouts = np.random.default_rng(i), []
    for j, (prompt, lens) in enumerate(zip(work["prompts"], work["resp_len"], strict=True)):
        given = Prompt(j, (), np.array(prompt["ids"], np.int32), "")
        for sample, n in enumerate(lens):
            tokens = rng.integers(5, min(5000, n_vocab), n).astype(np.int32)
            logp = np.full(n, -2.0, np.float32)
            mask, versions = np.ones(n, bool), np.full(n, i, np.int32)
            rollouts.append(
                Rollout(given, sample, tokens, logp, mask, versions=versions, finish="length")
            )
    return rollouts


def make_config(args: argparse.Namespace, workload: dict):
    from jaxrl.config.command_line import override
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
    config.learner.segment_align = args.segment_align
    config.learner.shared_prefixes = args.shared_prefixes
    config.learner.halvings = args.halvings
    config.learner.remat = args.remat
    config.learner.lr = 1e-5
    config.lora.rank, config.lora.merge = args.lora, args.merge
    for change in args.set:
        name, _, text = change.partition("=")
        override(config, name, text)
    return resolve(config)


if __name__ == "__main__":
    main()

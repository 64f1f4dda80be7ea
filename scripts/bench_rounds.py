"""Host time of the rollout engine's rounds, with a simulated device.

    python scripts/bench_rounds.py --sequences 2048 --round-ms 133

Runs responses through the rollout loop, the engine and its scheduler, whose programs are replaced
by a device that makes up tokens: after no time, which shows the host's time alone, or after
`--round-ms` per dispatch, which shows how long the device has nothing to do. The arrays of every
dispatch are filled as for a real device. All prompts are one prompt, so that prefill takes no
part; `--tail` has responses of exponentially distributed lengths in place of equal ones. Format:

    SEQUENCES sequences  ROUNDS rounds  host MICROSECONDS us per sequence and round  idle PERCENT %
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np


def main() -> None:
    args = parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    from sharding import make_mesh

    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        engine = make_engine(args)
        device = SimulatedDevice(engine.runner, args.round_ms / 1e3)
        bench(engine, device, args)


class SimulatedDevice:
    """Replaces the programs of a model runner: every decode dispatch takes `round_s`."""

    def __init__(self, runner: Any, round_s: float):
        self.round_s, self.idle_s = round_s, 0.0
        self._runner, self._decode_batch = runner, runner.decode_batch
        self._ready_at = 0.0  # the end of the last dispatch
        runner.decode = self.decode
        runner.prefill = lambda params, rows, bucket: None
        runner.copy_pages = lambda copies: None

    def decode(self, params, seqs, bucket, *, n_steps, exit_at, adjusted=False):
        from jaxrl.engine.device.model_runner import decode_output

        batch = self._decode_batch(seqs, bucket, adjusted=adjusted)
        tokens = np.full((bucket, n_steps), 7, np.int32)
        tokens[np.arange(n_steps) >= batch.remaining[:, None]] = -1
        columns = np.stack([tokens, np.zeros_like(tokens), np.zeros_like(tokens)])
        now = time.perf_counter()
        self.idle_s += max(now - self._ready_at, 0)
        self._ready_at = max(now, self._ready_at) + self.round_s
        time.sleep(max(self._ready_at - time.perf_counter(), 0))
        return decode_output(columns, batch.stop_ids, None, None, n_steps)


def make_engine(args: argparse.Namespace) -> Any:
    from jaxrl.config.keys import RolloutConfig
    from jaxrl.engine.engine import PagedEngine
    from jaxrl.models.config import uniform_decoder
    from sharding.rules import DECODE

    max_len = args.prompt_len + args.response_len
    rollout = RolloutConfig(
        max_num_seqs=args.sequences,
        page_len=args.page_len,
        steps_per_dispatch=args.steps,
        n_pages=args.sequences * -(-max_len // args.page_len),
    )
    shape = uniform_decoder("qwen2", L=1, D=8, N=1, K=1, H=8, F=8, V=256, max_len=max_len)
    return PagedEngine(shape, rollout, rules=DECODE, dtype="float32", max_len=max_len, eos_ids=(1,))


def bench(engine: Any, device: SimulatedDevice, args: argparse.Namespace) -> None:
    from jaxrl.config.keys import SamplingConfig
    from jaxrl.engine.api import Request
    from jaxrl.rollout.loop import RolloutLoop, SingleTurnRunner
    from jaxrl.rollout.schedule.buffer import PromptGroup
    from jaxrl.types import Prompt

    lens = np.full(args.sequences, args.response_len)
    if args.tail:
        drawn = np.random.default_rng(0).exponential(args.response_len / 4, args.sequences)
        lens = np.minimum(1 + drawn.astype(int), args.response_len)
    tokens = np.full(args.prompt_len, 3, np.int32)
    group = PromptGroup(Prompt(0, (), tokens, answer=""), seed=0, draw=0, index=0)

    def request(group: PromptGroup, sample: int) -> Request:
        return Request(tokens, int(lens[sample]), SamplingConfig(), 0, sample)

    loop = RolloutLoop(SingleTurnRunner(engine, request, lambda tokens: ""), n=args.sequences)
    loop.resume(0, [group])
    loop.dispatch(None)  # starts all sequences
    device.idle_s, start, host_us = 0.0, time.perf_counter(), []
    while loop.n_unfinished and len(host_us) < args.rounds:
        n, cpu = loop.n_unfinished, time.thread_time()
        loop.dispatch(None)
        host_us.append(1e6 * (time.thread_time() - cpu) / n)
    wall_s = time.perf_counter() - start
    print(
        f"{args.sequences} sequences  {len(host_us)} rounds  host {statistics.median(host_us):.2f} "
        f"us per sequence and round  idle {100 * device.idle_s / wall_s:.2f} %"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256, help="that run at the same time")
    parser.add_argument("--round-ms", type=float, default=0, help="time of a dispatch; 0 = none")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a dispatch")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--response-len", type=int, default=4096)
    parser.add_argument("--page-len", type=int, default=64)
    parser.add_argument("--tail", action="store_true", help="lengths from a distribution")
    return parser.parse_args()


if __name__ == "__main__":
    main()

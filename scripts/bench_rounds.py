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
import dataclasses
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
    """Replaces the programs of a model runner: every decode dispatch takes `round_s`.

    Its clock has the CPU time of the host's thread, and the waits for the device, which take none:
    other processes of the machine do not matter.
    """

    def __init__(self, runner: Any, round_s: float):
        self.round_s, self.idle_s = round_s, 0.0
        self._runner, self._ends_at, self._waited_s = runner, 0.0, 0.0
        runner.decode, runner.decode_next, runner.read = self.decode, self.decode_next, self.read
        runner.prefill = lambda params, rows, bucket: None
        runner.copy_pages = lambda copies: None

    def now(self) -> float:
        return time.thread_time() + self._waited_s

    def decode(self, params, seqs, bucket, variant, *, n_steps, exit_at):
        batch = self._runner.decode_batch(seqs, bucket, variant)
        return self._run(seqs, batch, n_steps, exit_at)

    def decode_next(self, params, last):
        from jaxrl.engine.device.batches import decode_tables

        bucket = len(last.batch.token)
        tables = decode_tables(last.seqs, bucket, self._runner.shapes)
        batch = dataclasses.replace(last.batch.with_state(last.state), page_tables=tables)
        return self._run(last.seqs, batch, last.n_steps, last.exit_at)

    def _run(self, seqs, batch, n_steps, exit_at):
        from jaxrl.engine.device.decode_loop import DecodeRound, DecodeState

        now = self.now()
        self.idle_s += max(now - self._ends_at, 0)
        runs = np.sum(batch.position >= 0) > exit_at
        self._ends_at = max(now, self._ends_at) + runs * self.round_s
        tokens = np.full((len(batch.token), n_steps), 7, np.int32)
        left = np.where(batch.position < 0, 0, batch.remaining)
        tokens[np.arange(n_steps) >= left[:, None]] = -1
        position = np.where(left > n_steps, batch.position + n_steps, -1)
        state = DecodeState(batch.token, position, batch.remaining - n_steps)
        output: Any = tokens, self._ends_at
        return DecodeRound(seqs, batch, output, n_steps, exit_at, state)

    def read(self, dispatched):
        from jaxrl.engine.device.decode_loop import decode_output

        tokens, ends_at = dispatched.output
        self._waited_s += max(ends_at - self.now(), 0)
        columns = np.stack([tokens, np.zeros_like(tokens), np.zeros_like(tokens)])
        stop_ids = dispatched.batch.stop_ids
        return decode_output(columns, stop_ids, None, None, tokens.shape[1])


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
    device.idle_s, start, host_us = 0.0, device.now(), []
    while loop.n_unfinished and len(host_us) < args.rounds:
        n, cpu = loop.n_unfinished, time.thread_time()
        loop.dispatch(None)
        host_us.append(1e6 * (time.thread_time() - cpu) / n)
    wall_s = device.now() - start
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

"""Kernels of a JAX trace of a GPU: time per program and kernel, and where the GPU is idle.

    python scripts/bench_step.py --model MODEL_FOLDER --workload WORKLOAD.json --trace TRACE
    python scripts/trace_kernels.py TRACE

TRACE is a folder that jax.profiler wrote: that of --trace, or run_dir/profile of a run with
`config.profile.steps`. Of several traces in it, the newest is read. Busy time is that in which at
least one kernel or copy runs. Idle time counts for the program that ends it: between its kernels,
or before its first. Format, per program and then per kernel:

    PROGRAM  CALLS calls  SECONDS s busy  SECONDS s idle, of which SECONDS s before the first kernel
        MICROSECONDS us x COUNT  SHARE %  KERNEL
"""

import argparse
import collections
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

COPIES = "copies outside of programs"


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel or copy of a device; times in nanoseconds."""

    start: float
    end: float
    program: str
    name: str


@dataclasses.dataclass
class ProgramTime:
    """Nanoseconds of all calls of a program."""

    n_calls: int = 0
    busy: float = 0.0
    idle: float = 0.0
    before: float = 0.0  # of `idle`, before the first kernel of a call
    kernels: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path, help="folder of the trace")
    parser.add_argument("--kernels", type=int, default=12, help="kernels shown per program")
    args = parser.parse_args()
    files = sorted(args.trace.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise SystemExit(f"error: there is no trace (*.xplane.pb) in {args.trace}")
    events = list(gpu_events(files[-1]))
    if not events:
        raise SystemExit(f"error: {files[-1]} has no kernels of a GPU; trace a run on a GPU")
    for program, time in sorted(by_program(events).items(), key=lambda item: -item[1].busy):
        busy, idle, before = (ns / 1e9 for ns in (time.busy, time.idle, time.before))
        print(
            f"{program}  {time.n_calls} calls  {busy:.4f} s busy  {idle:.4f} s idle, of which "
            f"{before:.4f} s before the first kernel"
        )
        total = sum(map(sum, time.kernels.values()))
        shown = sorted(time.kernels.items(), key=lambda item: -sum(item[1]))[: args.kernels]
        for name, spans in shown:
            took = sum(spans)
            print(
                f"    {took / len(spans) / 1e3:9.2f} us x {len(spans):6d}  "
                f"{100 * took / total:5.1f} %  {name[:90]}"
            )


def gpu_events(file: Path) -> Iterator[Event]:
    """The kernels and copies of the first GPU of a trace."""
    import jax

    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    gpus = sorted((plane for plane in planes if "GPU" in plane.name), key=lambda p: p.name)
    for line in gpus[0].lines if gpus else ():
        if line.name.startswith("Stream"):
            for event in line.events:
                program = dict(event.stats).get("hlo_module")
                end = event.start_ns + event.duration_ns
                yield Event(event.start_ns, end, str(program or ""), event.name)


def by_program(events: Iterable[Event]) -> dict[str, ProgramTime]:
    """Times of each program. Kernels of one program without another's in between are one call."""
    found: dict[str, ProgramTime] = collections.defaultdict(ProgramTime)
    running, until = "", None
    for event in sorted(events, key=lambda event: event.start):
        # a copy of no program, such as a batch's, belongs to no call
        time = found[event.program or COPIES]
        begins = bool(event.program) and event.program != running
        if begins:
            running, time.n_calls = event.program, time.n_calls + 1
        gap = max(event.start - until, 0.0) if until is not None else 0.0
        time.idle += gap
        time.before += gap if begins else 0.0
        busy_from = event.start if until is None else max(event.start, until)
        time.busy += max(event.end - busy_from, 0.0)
        time.kernels[event.name].append(event.end - event.start)
        until = event.end if until is None else max(until, event.end)
    return dict(found)


if __name__ == "__main__":
    main()

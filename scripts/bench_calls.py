"""Host time of a call of training's programs with listed layers: trees against flat lists.

    python scripts/bench_calls.py --layers 28 --devices 1

Calls functions with the arguments and results of scoring, of adding a micro-batch's gradients and
of an optimizer step, but without their computation, so that the time is that of the dispatch: by
`jax.jit` with trees, by `FlatProgram` with flat lists, as the learner calls them, and by `jax.jit`
with lists of arrays, which is the least that JAX needs. Times are those of the calling thread,
medians over calls of all in turn, and the fastest call. Format of a line:

    NAME  ARRAYS arrays  trees MEDIAN (FASTEST) ms  flat ...  lists ...  TREES/FLAT x  FLAT/LISTS x
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    args = parse_args()
    import jax  # after the number of devices is known

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    from sharding import make_mesh

    with jax.set_mesh(make_mesh(fsdp=args.devices)):
        state, batch = make_state(args.layers), make_batch(args.devices)
        grads = jax.tree.map(lambda p: p + 0, state.params)
        measure(args.calls, "score", lambda params, batch: batch.mask + 1, state.params, batch)
        measure(args.calls, "accumulate", lambda p, sums, batch: sums, state.params, grads, batch)
        measure(args.calls, "apply", lambda grads, state: state, state.params, state)


def make_state(n_layers: int) -> Any:
    """The state of a small model in bfloat16 with AdamW, on the current mesh."""
    import jax.numpy as jnp

    from jaxrl.config.keys import LearnerConfig
    from jaxrl.learner.optimizer import make_optimizer
    from jaxrl.learner.state import init_state
    from jaxrl.models.config import uniform_decoder
    from jaxrl.models.decoder import decoder_specs, init_model
    from sharding import TRAIN

    shape = uniform_decoder("qwen2", L=n_layers, D=64, N=4, K=2, H=16, F=64, V=256, qkv_bias=True)
    optimizer = make_optimizer(LearnerConfig(), 10, decoder_specs(shape))
    params = init_model(shape, seed=0, rules=TRAIN, dtype=jnp.bfloat16)
    return init_state(params, optimizer)


def make_batch(n_ranks: int) -> Any:
    from jaxrl.data.packing import empty_batch
    from jaxrl.learner.step import put_batch
    from sharding import TRAIN

    return put_batch(empty_batch(n_ranks, 128), TRAIN)


def measure(n_calls: int, name: str, function: Callable, *args: Any) -> None:
    """Prints a line for a function that gets these arguments.

    If it returns its second argument, as it does unless it scores, that is donated.
    """
    import jax

    from jaxrl.runtime.flat_program import FlatProgram, flatten
    from sharding import copy_tree

    donates = name != "score"
    options: dict[str, Any] = {"donate_argnums": 1} if donates else {}

    @functools.wraps(function)
    def returns_flat(*args: Any) -> Any:
        return flatten(function(*args))

    def copy() -> list[Any]:
        return [copy_tree(arg) for arg in args]

    def on_lists(*args: list[jax.Array]) -> Any:
        return jax.tree.leaves(function(*map(jax.tree.unflatten, structures, args)))

    structures = list(map(jax.tree.structure, args))
    calls = {
        "trees": (jax.jit(function, **options), copy()),
        "flat": (FlatProgram(returns_flat, **options), list(map(flatten, copy()))),
        "lists": (jax.jit(on_lists, **options), list(map(jax.tree.leaves, copy()))),
    }
    times: dict[str, list[float]] = {form: [] for form in calls}
    for _ in range(n_calls + 5):
        for form, (program, given) in calls.items():
            start = time.thread_time()
            result = program(*given)
            times[form].append(time.thread_time() - start)
            jax.block_until_ready(result)
            given[1] = result if donates else given[1]
    medians = {form: 1e3 * statistics.median(found[5:]) for form, found in times.items()}
    shown = (f"{form} {medians[form]:.2f} ({1e3 * min(times[form][5:]):.2f}) ms" for form in times)
    trees, flat, lists = medians.values()
    print(
        f"{name:11}{len(jax.tree.leaves(args)):5} arrays  {'  '.join(shown)}  "
        f"{trees / flat:.1f} x  {flat / lists:.2f} x"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=28, help="listed layers of the model")
    parser.add_argument("--devices", type=int, default=1, help="simulated devices, FSDP")
    parser.add_argument("--calls", type=int, default=100, help="timed calls of each program")
    return parser.parse_args()


if __name__ == "__main__":
    main()

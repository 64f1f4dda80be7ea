"""Time of one decoder layer on packed rows, by the TPU compiler's own estimate.

    python scripts/layer_cycles.py --model Llama-3.1-8B-Instruct --topology v6e:2x4 --mesh fsdp=8

Compiles the gradients of the model's first layer with attention for chips that are not attached,
with an MLP and tables of 128, for --rows packed rows of --tokens per device (two to four
CPU-minutes). MODEL is a shape of configs/shapes or a config.json. Splash attention itself has no
estimate. Prints one JSON line with milliseconds: `products` of kernels with matrix products,
`others` of copies and element-wise ones.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import sharding
from jaxrl.models.config import AttentionConfig, DecoderConfig, LoRA, MLPConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import combine, split
from jaxrl.models.packed import forward_packed
from jaxrl.models.spec import abstract_params
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.compiled.timeline import HloStep, Kernel, Loop
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.topology import Topology, topology
from jaxrl.types import Tree

WIDTH = 128  # of the MLP and the tables, which compile in less time than those of the model


def main() -> None:
    args = parse_args()
    machine = topology(args.topology)
    print(json.dumps(vars(args) | milliseconds(compile_layer(args, machine), machine)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="Llama-3.1-8B-Instruct")
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--mesh", nargs="+", default=["fsdp=8"], help="sizes, such as tensor=2")
    parser.add_argument("--rules", default="TRAIN", choices=("TRAIN", "ULYSSES", "RING"))
    parser.add_argument("--rows", type=int, default=3, help="packed rows per device")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per row")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 = all weights")
    parser.add_argument("--stacked", action="store_true", help="the layer runs in a scan")
    return parser.parse_args()


def one_layer(args: argparse.Namespace) -> DecoderConfig:
    """The first layer with attention, with a narrow MLP and a small vocabulary."""
    decoder = model_shape(args.model)
    layer = next(layer for layer in decoder.layers if isinstance(layer.mixer, AttentionConfig))
    layer = dataclasses.replace(layer, ffn=MLPConfig(WIDTH, "silu"))
    lora = LoRA(args.lora, 1.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    return dataclasses.replace(
        decoder,
        layers=(layer,),
        V=WIDTH,
        stacked=args.stacked,
        lora=lora if args.lora else None,
    )


def compile_layer(args: argparse.Namespace, machine: Topology) -> jax.stages.Compiled:
    """The gradients of the trained weights of `one_layer`."""
    sizes = {name: int(n) for name, n in (axis.split("=") for axis in args.mesh)}
    rules, decoder = getattr(sharding, args.rules), one_layer(args)

    def loss(trained: Tree, frozen: Tree, rows: jax.Array) -> jax.Array:
        model = combine(trained, frozen)
        hidden = forward_packed(model, rows, rows, rows, rules=rules)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    mesh = sharding.make_mesh(machine.devices, **sizes)
    with jax.set_mesh(mesh):
        params = abstract_params(decoder_specs(decoder), rules, jnp.bfloat16, mesh)
        shape = (args.rows * mesh.shape["replica"] * mesh.shape["fsdp"], args.tokens)
        rows = NamedSharding(mesh, rules.spec("batch", "time"))
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
        lowered = jax.jit(jax.grad(loss)).lower(*split(params), tokens)
        return lowered.compile(dict(machine.compiler_options) or None)


def milliseconds(compiled: jax.stages.Compiled, machine: Topology) -> dict[str, float]:
    """By the compiler's estimate: of kernels with matrix products, and of the others."""
    text = compiled.as_text()
    assert text is not None and machine.chip.clock_hz, "compilers of TPU have estimates"
    cycles = {True: 0.0, False: 0.0}
    for kernel in kernels(program_cost(text).steps):
        cycles[bool(kernel.flops)] += kernel.cycles
    products, others = (1e3 * cycles[kind] / machine.chip.clock_hz for kind in (True, False))
    return dict(products=round(products, 2), others=round(others, 2))


def kernels(steps: Sequence[HloStep]) -> Iterator[Kernel]:
    """All kernels, those of loops once."""
    for step in steps:
        if isinstance(step, Loop):
            yield from kernels(step.steps)
        elif isinstance(step, Kernel):
            yield step


if __name__ == "__main__":
    main()

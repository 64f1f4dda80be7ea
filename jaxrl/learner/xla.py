"""XLA compiler options for scoring and updates: chip defaults, named sets, single options."""

import importlib.metadata
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxrl.kernels.bits import ROUND_AS_WRITTEN
from sharding import target_device_kind, target_platform

CompilerOptions = dict[str, bool | int | str]

V5E, V5P, V6E = "TPU v5 lite", "TPU v5", "TPU v6 lite"
VMEM_LIMIT_KIB = "xla_tpu_scoped_vmem_limit_kib"
GATHER_FUSION = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
# The SparseCores of a chip run its collectives while its TensorCores compute. A gather over devices
# in a line, a plane or a cube has an option each. v7x does it without them.
WITH_SPARSE_CORES = (V5P, V6E)
SPARSE_CORES = [
    f"xla_tpu_enable_sparse_core_collective_offload_{collective}"
    for collective in (
        "all_gather",
        "2d_all_gather",
        "3d_all_gather",
        "reduce_scatter",
        "nd_reduce_scatter",
        "all_reduce",
    )
]
# Options that are errors of the compiler, or useless, on other chips of TPU.
CHIPS = {GATHER_FUSION: (V5E,)} | dict.fromkeys(SPARSE_CORES, WITH_SPARSE_CORES)

# KiB of VMEM that the products and fusions of a program may use, by chip. Larger tiles read their
# operands less often: by the compiler's estimate this is the difference between half of the peak
# rate and nine tenths of it on v6e.
VMEM_LIMIT = {V5P: 65536, V6E: 98304}
TRIED_VMEM_LIMITS = (32768, 65536, 98304)  # XLA's default is 16384

# overlap: collectives run concurrently with compute. prefetch: all-gather of the next layer's
# weights during the current layer (verl: forward prefetch, OpenRLHF: overlap_comm).
SETS: dict[str, dict[str, CompilerOptions]] = {
    "overlap": {
        "tpu": {
            "xla_tpu_enable_latency_hiding_scheduler": True,
            "xla_tpu_enable_async_collective_fusion": True,
            GATHER_FUSION: True,
            "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
            "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
            "xla_tpu_overlap_compute_collective_tc": True,
            "xla_enable_async_all_gather": True,
            "xla_enable_async_collective_permute": True,
            **dict.fromkeys(SPARSE_CORES, True),
        },
        "gpu": {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_enable_highest_priority_async_stream": True,
        },
        "cpu": {},
    },
    "prefetch": {
        "tpu": {"xla_tpu_enable_ag_backward_pipelining": True},
        "gpu": {"xla_gpu_enable_while_loop_double_buffering": True},
        "cpu": {},
    },
    "combine": {  # fewer, larger messages: for many small weights or slow networks
        "tpu": {
            "xla_tpu_enable_data_parallel_all_reduce_opt": True,
            "xla_tpu_data_parallel_opt_different_sized_ops": True,
        },
        "gpu": {
            "xla_gpu_all_gather_combine_threshold_bytes": 2**28,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**28,
            "xla_gpu_all_reduce_combine_threshold_bytes": 2**28,
        },
        "cpu": {},
    },
}


def compiler_options(names: Sequence[str], platform: str, device_kind: str = "") -> CompilerOptions:
    """Compiler options of config.learner.xla on a platform: named sets or 'name=value' options.

    They include the defaults of the chip (`device_kind`, as JAX names it), which an option by name
    replaces. Sets leave out what the chip does not have. Raises ValueError for a name that is
    neither.
    """
    options: CompilerOptions = dict(ROUND_AS_WRITTEN)
    if device_kind in VMEM_LIMIT:
        options[VMEM_LIMIT_KIB] = VMEM_LIMIT[device_kind]
    for name in names:
        option, equals, value = name.partition("=")
        if equals:
            options[option] = _value(value)
        elif name in SETS:
            options |= {
                option: value
                for option, value in SETS[name][platform].items()
                if device_kind in CHIPS.get(option, (device_kind,))
            }
        else:
            raise ValueError(
                f"config.learner.xla has {name!r}, which is no set of compiler options; set some "
                f"of {', '.join(SETS)}, or 'xla_option=value'"
            )
    return options


def options_to_try(names: Sequence[str], platform: str, device_kind: str) -> list[str]:
    """Sets and single options that would change the options of `names`; none on CPUs."""
    limits = [f"{VMEM_LIMIT_KIB}={kib}" for kib in TRIED_VMEM_LIMITS] * (platform == "tpu")
    present = compiler_options(names, platform, device_kind)
    return [
        one
        for one in (*SETS, *limits)
        if compiler_options(with_option(names, one), platform, device_kind) != present
    ]


def with_option(names: Sequence[str], new: str) -> tuple[str, ...]:
    """`names` and a set or option, which replaces another value of that option."""
    option = new.partition("=")[0]
    return (*(name for name in names if name.partition("=")[0] != option), new)


def check_options(names: Sequence[str]) -> None:
    """Raises ValueError if the compiler of the current mesh does not know an option, or its value.

    The message has all unknown options of config.learner.xla and of the chip's defaults.
    """
    platform = target_platform()
    options = compiler_options(names, platform, target_device_kind())
    if options == ROUND_AS_WRITTEN:
        return
    whole = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
    program = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole))
    if unknown := _unknown(options, program):
        packages = ["jaxlib", *["libtpu"] * (platform == "tpu")]
        versions = ", ".join(f"{one} {importlib.metadata.version(one)}" for one in packages)
        raise ValueError(
            f"the compiler of {versions} does not know {', '.join(unknown)}; leave the options "
            "and the sets that have them (docs/how_to/planner.md) out of config.learner.xla, or "
            "install another version"
        )


def _unknown(options: Mapping[str, bool | int | str], program: jax.stages.Lowered) -> list[str]:
    """The options that the compiler does not know; it names one at a time."""
    unknown: list[str] = []
    while True:
        try:
            program.compile({name: options[name] for name in options if name not in unknown})
        except jax.errors.JaxRuntimeError as error:
            named = re.search(r"No such compile option: '([^']*)'", str(error))
            if named is None:  # a value that the option does not take
                raise ValueError(f"config.learner.xla: {str(error).splitlines()[0]}") from error
            unknown.append(named[1])
        else:
            return unknown


def _value(text: str) -> bool | int | str:
    """Boolean or integer if the text is one, which XLA does not accept as text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text

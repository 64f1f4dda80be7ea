"""XLA compiler options for scoring and updates: named sets per backend, or single options."""

from collections.abc import Sequence

from jaxrl.kernels.bits import ROUND_AS_WRITTEN

V5E, V5P, V6E = "TPU v5 lite", "TPU v5", "TPU v6 lite"
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

# overlap: collectives run concurrently with compute. prefetch: all-gather of the next layer's
# weights during the current layer (verl: forward prefetch, OpenRLHF: overlap_comm).
SETS: dict[str, dict[str, dict[str, bool | int | str]]] = {
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


def compiler_options(
    names: Sequence[str], platform: str, device_kind: str = ""
) -> dict[str, bool | int | str]:
    """Compiler options of config.learner.xla on a platform: named sets or 'name=value' options.

    Sets leave out what the chip (`device_kind`, as JAX names it) does not have. Raises ValueError
    for a name that is neither.
    """
    options: dict[str, bool | int | str] = dict(ROUND_AS_WRITTEN)
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


def _value(text: str) -> bool | int | str:
    """Boolean or integer if the text is one, which XLA does not accept as text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text

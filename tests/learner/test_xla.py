"""Compiler options of the config reach the compiler; unknown names are errors."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxlib
import pytest

from jaxrl.kernels.bits import ROUND_AS_WRITTEN
from jaxrl.learner.step import make_score
from jaxrl.learner.xla import (
    CHIPS,
    GATHER_FUSION,
    SETS,
    SPARSE_CORES,
    check_options,
    compiler_options,
)
from sharding import TRAIN
from tests.learner.tiny_policy import batches, new_params, rollouts, run_config


def test_sets_and_single_options_are_joined_in_order():
    options = compiler_options(("prefetch", "a=true", "b=-3", "c=x", "a=false"), "tpu")
    named = {"xla_tpu_enable_ag_backward_pipelining": True, "a": False, "b": -3, "c": "x"}
    assert options == ROUND_AS_WRITTEN | named
    assert compiler_options((), "gpu") == compiler_options(tuple(SETS), "cpu") == ROUND_AS_WRITTEN


def test_an_option_by_name_replaces_a_default():
    options = compiler_options(("xla_allow_excess_precision=true",), "gpu")
    assert options == {"xla_allow_excess_precision": True}


def test_an_unknown_set_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'overlapp', .*set some of overlap, prefetch, combine"):
        compiler_options(("overlapp",), "tpu")


def test_every_set_knows_every_platform():
    assert all(set(SETS[name]) == {"cpu", "gpu", "tpu"} for name in SETS)


@pytest.mark.parametrize("name", SETS)
def test_the_compiler_knows_the_gpu_options(name):
    double = jax.jit(lambda x: 2 * x).lower(jnp.ones(2))
    double.compile(SETS[name]["gpu"])  # their names are checked on every backend


def test_options_of_the_config_reach_the_compiler(one_device):
    score = make_score(run_config(dict(xla=("xla_no_such_option=1",))), TRAIN)
    with pytest.raises(Exception, match="No such compile option: 'xla_no_such_option'"):
        jax.block_until_ready(score(*score_arguments()))


def score_arguments():
    return new_params(), batches(rollouts(2), row_len=32, token_budget=32)[0]


def test_products_get_the_scratch_memory_of_their_chip():
    name = "xla_tpu_scoped_vmem_limit_kib"
    limits = [compiler_options((), "tpu", chip).get(name) for chip in ("TPU v5", "TPU v6 lite")]
    assert limits == [65536, 98304]
    assert name not in compiler_options((), "tpu", "TPU v5 lite")
    assert compiler_options((f"{name}=32768",), "tpu", "TPU v6 lite")[name] == 32768


def test_options_that_the_compiler_does_not_know_are_named_at_once_with_its_version(one_device):
    names = ("xla_no_such_option=1", "overlap", "xla_cpu_enable_fast_math=false", "xla_nor=x")
    expected = f"compiler of jaxlib {jaxlib.__version__} does not know xla_no_such_option, xla_nor;"
    with pytest.raises(ValueError, match=expected):
        check_options(names)
    check_options(names[1:3])
    with pytest.raises(ValueError, match=r"config.learner.xla: .*'perhaps' is not a valid bool"):
        check_options(("xla_cpu_enable_fast_math=perhaps",))


def test_chips_overlap_collectives_each_in_its_way():
    """v5e fuses gathers into products, an error on other chips; v5p and v6e have SparseCores."""

    def special(chip: str) -> set[str]:
        return CHIPS.keys() & compiler_options(("overlap",), "tpu", chip)

    assert special("TPU v5 lite") == {GATHER_FUSION}
    assert special("TPU v5") == special("TPU v6 lite") == set(SPARSE_CORES)
    assert special("TPU v4") == special("TPU7x") == set()
    by_name = compiler_options(("overlap", f"{GATHER_FUSION}=true"), "tpu", "TPU v5")
    assert by_name[GATHER_FUSION] is True


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_tpu_compiler_gathers_with_all_sets(chip):
    pytest.importorskip("libtpu")
    code = f"""
import os
os.environ |= {{"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}}
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jaxrl.learner.xla import SETS, compiler_options
devices = topologies.get_topology_desc(platform="tpu", topology_name="{chip}").devices
explicit = jax.sharding.AxisType.Explicit
mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",), axis_types=(explicit,))
options = compiler_options(tuple(SETS), "tpu", devices[0].device_kind)
with jax.set_mesh(mesh):
    x, w = (jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
            for spec in (jax.P(), jax.P("fsdp")))
    gather = jax.jit(lambda x, w: x @ jax.reshard(w, jax.P()))
    assert "all-gather" in gather.lower(x, w).compile(options).as_text()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

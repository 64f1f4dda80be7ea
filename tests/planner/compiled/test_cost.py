"""Costs read from compiled programs: jaxrl/planner/compiled/cost.py, hlo.py and kernels.py."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl.planner.compiled.cost import program_cost, replica_group
from jaxrl.planner.compiled.hlo import HloShape, parse
from jaxrl.planner.compiled.kernels import (
    attention_work,
    cudnn_work,
    delta_step_work,
    grouped_tpu_work,
    grouped_work,
    paged_work,
)

FLOAT = 4


def compiled(fn, *shapes) -> str:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(fn).lower(*args).compile().as_text()


def test_a_matrix_product_in_a_scan_counts_once_per_iteration():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    cost = program_cost(compiled(layers, (16, 32), (5, 32, 32)))
    assert cost.flops == {"f32": 5 * 2 * 16 * 32 * 32}
    assert not cost.unknown_loops


def test_a_data_dependent_loop_uses_the_given_trip_count():
    def loop(x, w, n):
        with jax.named_scope("attention"):
            return jax.lax.fori_loop(0, n.astype(jnp.int32), lambda i, x: jnp.tanh(x @ w), x)

    text = compiled(loop, (16, 32), (32, 32), ())
    once, names = program_cost(text), []
    cost = program_cost(text, lambda name: names.append(name) or 7)
    assert once.total_flops == 2 * 16 * 32 * 32 and len(once.unknown_loops) == 1
    assert cost.total_flops == 7 * once.total_flops and not cost.unknown_loops
    assert "attention" in names[0]


def test_a_stacked_array_that_is_sliced_in_a_loop_is_read_once():
    def total(stack):
        return jax.lax.fori_loop(0, 64, lambda i, t: t + jnp.sin(stack[i]), jnp.zeros(4096))

    stack = 64 * 4096 * FLOAT
    bytes_accessed = program_cost(compiled(total, (64, 4096))).bytes_accessed
    # the stack once, the sum read and written in each of 64 iterations, at most one copy of the sum
    assert 3 * stack <= bytes_accessed <= 4.1 * stack


def test_flops_agree_with_xla_without_loops():
    def fn(x, w, v):
        return jnp.einsum("bij,bjk->bik", x, w) @ v

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 64, 32), (8, 32, 64), (64, 128))]
    program = jax.jit(fn).lower(*args).compile()
    by_hand = 2 * 8 * 64 * 32 * 64 + 2 * 8 * 64 * 64 * 128
    assert program_cost(program.as_text()).total_flops == by_hand
    assert program.cost_analysis()["flops"] == pytest.approx(by_hand, rel=0.01)


def test_collectives_have_kind_size_group_and_executions():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=jax.P("a", "b"), out_specs=jax.P("a", "b")
    )
    def fn(x):
        def body(_, x):
            return x + jax.lax.psum(x, "b")

        x = jax.lax.fori_loop(0, 3, body, x)
        return x + jnp.sum(jax.lax.all_gather(x, "a"), axis=0)

    cost = program_cost(compiled(fn, (16, 64)))
    local = 4 * 32 * FLOAT  # per device
    found = {one.kind: one for one in cost.collectives}
    assert cost.collectives_by_kind() == {
        "all-gather": {"count": 1, "bytes": 4 * local},
        "all-reduce": {"count": 3, "bytes": 3 * local},
    }
    assert (found["all-reduce"].n_devices, found["all-reduce"].times) == (2, 3)
    assert (found["all-gather"].n_devices, found["all-gather"].times) == (4, 1)


def test_a_conditional_counts_as_its_cheapest_branch():
    def fn(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x)

    assert program_cost(compiled(fn, (8, 16), (16, 16))).total_flops == 0


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("replica_groups={{0,2,4},{1,3,5}}, x", [0, 2, 4]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", [0, 2, 4, 6]),
        ("replica_groups=[4,2]<=[8], x", [0, 1]),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}, x", [0, 2, 4, 6]),
        ("source_target_pairs={{0,1},{1,2},{2,0}}, x", [0, 1]),
    ],
)
def test_replica_groups_are_read_in_every_notation(text, members):
    assert replica_group(text) == members


def test_matrix_products_on_tpu_are_convolutions():
    # [6, 8] x [8, 10], batch of 4 as a window with one valid position:
    # 4 * 6 * 10 outputs of 8 products
    text = """
ENTRY %main (a: bf16[4,6,8], b: bf16[4,8,10]) -> bf16[4,6,10] {
  %a = bf16[4,6,8]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[4,8,10]{2,1,0} parameter(1)
  ROOT %c = bf16[4,6,10]{2,1,0} convolution(%a, %b), WINDOW, dim_labels=0bf_0io->0bf
}
"""
    text = text.replace("WINDOW", "window={size=4 stride=3 pad=0_0 lhs_dilate=4}")
    cost = program_cost(text)
    assert cost.flops == {"bf16": 2 * 4 * 6 * 10 * 8}
    assert cost.bytes_accessed == 2 * (4 * 8 * 10 + 4 * 6 * 10)  # `a` is in on-chip memory


def test_an_asynchronous_collective_counts_once():
    text = """
%start (p: bf16[8]) -> (bf16[8], bf16[32]) {
  %p = bf16[8]{0} parameter(0)
  %g = bf16[32]{0} all-gather(%p), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %s = (bf16[8]{0}, bf16[32]{0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%done (p: bf16[8]) -> bf16[32] {
  %p.1 = bf16[8]{0} parameter(0)
  %g.1 = bf16[32]{0} all-gather(%p.1), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %d = bf16[32]{0} custom-call(%g.1), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2 (p: bf16[32]) -> bf16[8] {
  %p.2 = bf16[32]{0} parameter(0)
  %r = bf16[32]{0} all-reduce(%p.2), replica_groups={{0,1,2,3}}, to_apply=%add
  %i = u32[] partition-id()
  ROOT %slice = bf16[8]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={8}
}

ENTRY %main (x: bf16[8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  %a = (bf16[8]{0}, bf16[32]{0}) fusion(%x), kind=kCustom, calls=%start
  %y = bf16[8]{0} get-tuple-element(%a), index=0
  %b = bf16[32]{0} fusion(%y), kind=kCustom, calls=%done
  ROOT %c = bf16[8]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.2
}
"""
    assert program_cost(text).collectives_by_kind() == {
        "all-gather": {"count": 1, "bytes": 64},
        "reduce-scatter": {"count": 1, "bytes": 64},
    }


def test_host_copies_count_as_host_traffic():
    text = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)S(5)} parameter(0)
  %a = (f32[8]{0}, f32[8]{0:T(128)S(5)}, u32[]{:S(2)}) copy-start(%p)
  %b = f32[8]{0} copy-done(%a)
  %c = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%b)
  %d = f32[8]{0:S(1)} copy-done(%c)
  %e = f32[8]{0} copy(%d)
  %f = (f32[8]{0:S(5)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%e)
  ROOT %g = f32[8]{0:S(5)} copy-done(%f)
}
"""
    cost = program_cost(text)
    assert cost.host_bytes == 2 * 32  # %a and %f
    assert cost.bytes_accessed == 4 * 32  # %a writes, %c reads, %e writes, %f reads


def test_slices_of_arrays_in_host_memory_count_as_host_traffic():
    """Layer inputs on their way to host memory and back, fused (GPU) and asynchronous (TPU)."""
    text = """
%wrapped (a: f32[4,8], u: f32[1,8], i: s32[]) -> f32[4,8] {
  %a = f32[4,8]{1,0:S(5)} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %put = f32[4,8]{1,0:S(5)} dynamic-update-slice(%a, %u, %i, %i)
}

ENTRY %main (p: f32[4,8], x: f32[1,8], i: s32[]) -> f32[1,8] {
  %p = f32[4,8]{1,0:S(5)} parameter(0)
  %x = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %b = f32[4,8]{1,0:S(5)} fusion(%p, %x, %i), kind=kLoop, calls=%wrapped
  %c = ((f32[4,8]{1,0:S(5)}, s32[], s32[]), f32[1,8]{1,0}, u32[]) dynamic-slice-start(%b, %i, %i)
  ROOT %d = f32[1,8]{1,0} dynamic-slice-done(%c)
}
"""
    assert program_cost(text).host_bytes == 2 * 32  # one row of 8 numbers there, one back


def test_a_slice_in_a_nested_fusion_counts_as_the_slice():
    text = """
%inner (p: f32[64,8], i: s32[]) -> f32[1,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}
}

%outer (q: f32[64,8], j: s32[]) -> f32[1,8] {
  %q = f32[64,8]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %some = f32[1,8]{1,0} fusion(%q, %j), kind=kLoop, calls=%inner
  ROOT %out = f32[1,8]{1,0} negate(%some)
}

ENTRY %main (x: f32[64,8], n: s32[]) -> f32[1,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %y = f32[1,8]{1,0} fusion(%x, %n), kind=kLoop, calls=%outer
}
"""
    # a row read and a row written, and the index
    assert program_cost(text).bytes_accessed == 2 * 8 * FLOAT + 4


def test_a_layout_copy_in_a_fusion_reads_only_the_slice():
    text = """
%relayout (p: s8[64,8]) -> s8[64,8] {
  %p = s8[64,8]{1,0:T(32,128)} parameter(0)
  ROOT %copied = s8[64,8]{1,0:T(8,128)} copy(%p)
}

%outer (q: s8[64,8], j: s32[]) -> s8[1,8] {
  %q = s8[64,8]{1,0:T(32,128)} parameter(0)
  %j = s32[] parameter(1)
  %zero = s32[] constant(0)
  %all = s8[64,8]{1,0:T(8,128)} fusion(%q), kind=kLoop, calls=%relayout
  ROOT %row = s8[1,8]{1,0} dynamic-slice(%all, %j, %zero), dynamic_slice_sizes={1,8}
}

ENTRY %main (x: s8[64,8], n: s32[]) -> s8[1,8] {
  %x = s8[64,8]{1,0:T(32,128)} parameter(0)
  %n = s32[] parameter(1)
  ROOT %y = s8[1,8]{1,0} fusion(%x, %n), kind=kLoop, calls=%outer
}
"""
    # a row of bytes read and written, and the index
    assert program_cost(text).bytes_accessed == 2 * 8 + 4


def test_an_asynchronous_slice_of_a_gpu_counts_as_the_slice():
    text = """
%slice (p: f32[64,8], i: s32[]) -> f32[1,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}
}

ENTRY %main (x: f32[64,8], n: s32[]) -> f32[1,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %s = ((f32[64,8]{1,0}, s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%x, %n), kind=kLoop, calls=%slice
  ROOT %y = f32[1,8]{1,0} fusion-done(%s)
}
"""  # noqa: E501
    assert program_cost(text).bytes_accessed == 2 * 8 * FLOAT + 4


def test_the_scratch_memory_of_a_matrix_library_is_no_traffic():
    text = """
ENTRY %main (a: bf16[4,8], b: bf16[6,8]) -> (bf16[4,6], s8[1000]) {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[6,8]{1,0} parameter(1)
  ROOT %c = (bf16[4,6]{1,0}, s8[1000]{0}) custom-call(%a, %b), custom_call_target=TARGET, CONFIG
}
"""
    text = text.replace("TARGET", '"__cublas$lt$matmul"')
    text = text.replace("CONFIG", 'backend_config={"lhs_contracting_dimensions":["1"]}')
    cost = program_cost(text)
    assert cost.flops == {"bf16": 2 * 4 * 6 * 8}
    assert cost.bytes_accessed == 2 * (4 * 8 + 6 * 8 + 4 * 6)


def kernel_of_gpu(name: str, results: str, operands: list[str]) -> str:
    """The text of a GPU module with one kernel; the kernel's code is shortened."""
    lines = [f"  %p.{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    names = ", ".join(f"{'/*index=5*/' if i == 5 else ''}%p.{i}" for i in range(len(operands)))
    call = (
        f"  ROOT %pallas_call.7 = {results} custom-call({names}), "
        'custom_call_target="__gpu$xla.gpu.triton", '
        f"operand_layout_constraints={{{', '.join(operands)}}}, api_version=API_VERSION_TYPED_FFI, "
        f'metadata={{op_name="jit(f)/attention/shard_map/{name}/pallas_call" stack_frame_id=32}}, '
        r'backend_config={debug = false, grid_x = 16 : i32, ir = "ML\EFR\0D(\22)\05{W", '
        "num_warps = 4 : i32}"
    )
    return "\n".join(["ENTRY %main () -> f32[] {", *lines, call, "}"])


BLOCKS = ("low", "low")  # per block the first and the last block that it meets
ENDS = ("starts", "starts")  # per token the first and the last token that it sees


@pytest.mark.parametrize(
    ("name", "products", "operands", "results"),
    [
        ("fwd", 2, [*BLOCKS, "q", "k", "k", *ENDS], "(q, numbers)"),
        ("dq", 3, [*BLOCKS, "q", "k", "k", "q", "numbers", "numbers", *ENDS], "q"),
        ("dkv", 4, [*BLOCKS, "q", "k", "k", "q", "numbers", "numbers", *ENDS], "(k, k)"),
    ],
)
def test_the_work_of_gpu_training_attention_is_known(name, products, operands, results):
    B, T, N, K, H = 2, 1024, 8, 4, 64
    shapes = {
        "low": f"s32[{B},{T // 64}]{{1,0}}",
        "q": f"bf16[{B},{T},{N},{H}]{{3,2,1,0}}",
        "k": f"bf16[{B},{T},{K},{H}]{{3,2,1,0}}",
        "numbers": f"f32[{B},{N},{T}]{{2,1,0}}",
        "starts": f"s32[{B},{T}]{{1,0}}",
    }
    results = re.sub(r"\w+", lambda match: shapes[match[0]], results)
    text = kernel_of_gpu(f"packed_attention_{name}", results, [shapes[one] for one in operands])
    blind = program_cost(text)
    cost = program_cost(text, kernels=functools.partial(attention_work, keys=256.0))
    assert blind.total_flops == 0
    visits = (
        B * N * T // 64 * (256 + 64) / 64
    )  # pairs of a block of 64 queries and a block of 64 keys
    assert cost.flops == {"bf16": products * 2 * visits * 64 * 64 * H}
    # each pair reads two blocks again: keys and values, or queries and gradients
    again = visits * 2 * 64 * H * 2
    assert cost.bytes_accessed - blind.bytes_accessed == again and not cost.l2_bytes
    # what a GPU computes at a time are 264 blocks of 64; they and the last head's read two arrays
    working_set = (264 * 64 + T) * H * 2 * 2
    for cache, cached in ((float(working_set), again), (working_set - 1.0, 0)):
        work = functools.partial(attention_work, keys=256.0, l2_cache_bytes=cache)
        cost = program_cost(text, kernels=work)
        assert cost.l2_bytes == cached
        assert cost.bytes_accessed == blind.bytes_accessed + again - cached


@pytest.mark.parametrize(
    ("name", "products", "pairs"), [("fwd", 2, (24, 8)), ("dq", 3, (24, 8)), ("dkv", 4, (8, 24))]
)
def test_splash_visits_the_blocks_of_its_own_row(name, products, pairs):
    N, n, block, H = 4, 8, 512, 128
    q = HloShape("bf16", (N, 3 * n * block, H))  # three rows
    schedule = HloShape("s32", (1, *pairs))
    operands = [schedule, *[q] * 6] if name == "dkv" else [schedule, schedule, *[q] * 5]
    for keys, visits in ((256.0, 256 + 512), (2048.0, 4.5 * 512)):  # half a row; half of all pairs
        work = attention_work(f"splash_mha_{name}", operands, [q], keys)
        assert work.flops == 2 * products * N * 3 * n * block * visits * H


@pytest.mark.parametrize(("name", "products"), [("fwd", 2), ("bwd", 5)])
def test_the_work_of_cudnn_attention_is_known(name, products):
    B, T, N, H = 2, 1024, 8, 64
    q, lengths = f"bf16[{B},{T},{N},{H}]{{3,2,1,0}}", f"s32[{B},4]{{1,0}}"
    text = kernel_of_gpu(f"cudnn_attention_{name}", q, [q, q, q, lengths, lengths])
    blind = program_cost(text)
    cost = program_cost(text, kernels=functools.partial(cudnn_work, keys=256.0))
    assert cost.flops == {"bf16": products * 2 * B * N * T * 256 * H}
    full = program_cost(text, kernels=functools.partial(cudnn_work, keys=1000.0))
    assert full.flops == {"bf16": products * 2 * B * N * T * 512 * H}  # at most half of the row
    assert cost.bytes_accessed == blind.bytes_accessed


def grouped_cost(name, shapes, result, l2_bytes=2.0**30):
    """(cost without and with the kernel's work) of a grouped product of the GPU kernel."""
    scalars = ["s32[24]{0}"] * (2 if name == "weights" else 3)
    text = kernel_of_gpu(f"grouped_matmul_{name}_128x128", result, [*scalars, *shapes])
    work = functools.partial(grouped_work, l2_cache_bytes=l2_bytes)
    return program_cost(text), program_cost(text, kernels=work)


def test_a_grouped_product_on_gpu_reads_a_matrix_once_per_tile_of_rows():
    M, D, F, E = 4096, 256, 384, 8  # groups of 512 rows: 4 tiles; 3 columns of tiles
    x, w, y = f"bf16[{M},{D}]{{1,0}}", f"bf16[{E},{F},{D}]{{2,1,0}}", f"bf16[{M},{F}]{{1,0}}"
    blind, cost = grouped_cost("rows", [x, w], y)
    assert cost.flops == {"bf16": 2 * M * D * F}
    assert cost.bytes_accessed == blind.bytes_accessed
    assert cost.l2_bytes == 2 * (2 * M * D + 3 * E * F * D)
    matrix = 2 * F * D
    # Of a matrix that takes more than half of the cache, 8 tiles share what is read from HBM.
    M *= 4
    x, y = f"bf16[{M},{D}]{{1,0}}", f"bf16[{M},{F}]{{1,0}}"
    blind, cost = grouped_cost("rows", [x, w], y, l2_bytes=2.0 * matrix - 1)
    assert cost.bytes_accessed - blind.bytes_accessed == E * matrix
    assert cost.l2_bytes == 2 * 2 * M * D + (16 - 2) * E * matrix


def test_a_grouped_product_of_few_rows_reads_only_their_matrices():
    M, D, F, E = 32, 256, 384, 128
    x, w, y = f"bf16[{M},{D}]{{1,0}}", f"s8[{E},{F},{D}]{{2,1,0}}", f"bf16[{M},{F}]{{1,0}}"
    blind, cost = grouped_cost("rows", [x, w], y)
    assert cost.flops == {"bf16": 2 * M * D * F}
    assert blind.bytes_accessed - cost.bytes_accessed == (E - M) * F * D


def test_the_gradient_of_grouped_matrices_on_gpu_reads_rows_once_per_tile():
    M, D, F, E = 4096, 256, 384, 8
    x, dy, dw = f"bf16[{M},{D}]{{1,0}}", f"bf16[{M},{F}]{{1,0}}", f"bf16[{E},{F},{D}]{{2,1,0}}"
    blind, cost = grouped_cost("weights", [x, dy], dw)
    assert cost.flops == {"bf16": 2 * M * D * F}
    assert cost.bytes_accessed == blind.bytes_accessed
    assert cost.l2_bytes == 2 * (2 * M * D + 1 * M * F)


def test_gpu_paged_attention_reads_the_pages_of_its_rows():
    R, K, M, H, page_len, parts = 64, 4, 16, 64, 32, 3
    pool = f"bf16[2048,{K},{page_len},{H}]{{3,2,1,0}}"
    text = kernel_of_gpu(
        "paged_attention_triton",
        f"(f32[{parts},{R},{K},{M},{H}]{{4,3,2,1,0}}, f32[{parts},{R},{K},{M}]{{3,2,1,0}})",
        [
            "s32[2048]{0}", f"s32[{R}]{{0}}", f"s32[{R}]{{0}}", "s32[1]{0}",
            f"bf16[{R},{K},{M},{H}]{{3,2,1,0}}", f"s32[{R},{M}]{{1,0}}", pool, pool,
        ],
    )  # fmt: skip
    cost = program_cost(text, kernels=functools.partial(paged_work, keys=500.0))
    keys = 500 + page_len / 2  # the last page is read in full
    assert cost.flops == {"bf16": 2 * 2 * R * K * M * keys * H}
    table, numbers, mixed = 2048 + 2 * R + 1 + R * M, parts * R * K * M, parts * R * K * M * H
    pages = R * keys * K * H
    assert cost.bytes_accessed == 4 * (table + numbers + mixed) + 2 * R * K * M * H + 2 * 2 * pages


def test_a_step_of_gated_delta_net_moves_the_states_of_its_rows():
    S, B, N, D = 100, 8, 4, 32
    pool, tokens, gates = f"f32[{S},{N},{D},{D}]", f"bf16[{B},1,{N},{D}]", f"f32[{B},1,{N}]"
    operands = [f"s32[{B}]", tokens, tokens, tokens, gates, gates, pool]
    text = kernel_of_gpu("gated_delta_step_gpu", f"({tokens}, {pool})", operands)
    cost = program_cost(text, kernels=delta_step_work)
    vectors = 4 * 2 * B * N * D  # q, k, v and the output, in bfloat16
    states, others = 4 * B * N * D * D, vectors + 2 * 4 * B * N + 4 * B
    assert cost.bytes_accessed == 2 * states + others
    assert cost.total_flops == 0
    reads = kernel_of_gpu("gated_delta_step_gpu", tokens, operands)  # of draft tokens
    assert program_cost(reads, kernels=delta_step_work).bytes_accessed == states + others


@pytest.mark.parametrize(
    ("name", "w", "result", "matrices"),
    [  # of 8 matrices of a layer, of which 64 rows read all
        ("ragged_dot_general/ragged-dot-none", (8, 96, 32), (64, 96), 8),
        ("grouped_matmul_stack/pallas_call", (5, 8, 96, 32), (64, 96), 8),
        ("grouped_matmul_stack/pallas_call", (5, 128, 96, 32), (64, 96), 64),
        ("ragged_dot_general/ragged-dot-none", (64, 96), (8, 32, 96), None),  # backward, of w
    ],
)
def test_grouped_products_read_the_matrices_of_one_layer(name, w, result, matrices):
    operand = ",".join(map(str, w))
    out = ",".join(map(str, result))
    text = f"""
ENTRY %main () -> f32[] {{
  %n = s32[8]{{0}} parameter(0)
  %x = bf16[64,32]{{1,0}} parameter(1)
  %w = bf16[{operand}] parameter(2)
  ROOT %call = f32[{out}] custom-call(%n, %x, %w), custom_call_target="tpu_custom_call", \
metadata={{op_name="jit(f)/{name}"}}
}}"""
    cost = program_cost(text.replace("\\\n", ""), kernels=grouped_tpu_work)
    assert cost.flops == {"bf16": 2 * 64 * 32 * 96}
    read = 64 * 96 if matrices is None else matrices * 96 * 32
    assert cost.bytes_accessed == 4 * 8 + 2 * 64 * 32 + 2 * read + 4 * math.prod(result)
    other = text.replace(name, "ragged-dot-metadata")
    assert program_cost(other, kernels=grouped_tpu_work).total_flops == 0


def test_text_without_an_entry_computation_is_rejected():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing")

"""FLOPs and memory traffic of kernels: attention, gated DeltaNet's step, grouped products.

A compiled module shows only a kernel's operands and results, and XLA knows no more.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

from jaxrl.kernels.attention.limits import BLOCK
from jaxrl.kernels.grouped_matmul.tiles import SHARED_TILES
from jaxrl.planner.compiled.hlo import HloShape

# (op_name, operands, results) of a kernel -> its work; None for an unknown kernel
KernelCosts = Callable[[str, Sequence[HloShape], Sequence[HloShape]], "KernelWork | None"]
ATTENTION = re.compile(r"(splash_mha|packed_attention)_(fwd|dq|dkv)")
# Per kernel: matrix products per (query block, key block) pair, index of the operand q, and indices
# of the operands that every pair reads again: k and v, or q and dO.
BLOCK_WORK = {
    "splash_mha_fwd": (2, 2, (3, 4)),
    "splash_mha_dq": (3, 2, (3, 4)),
    "splash_mha_dkv": (4, 2, (2, 6)),
    "packed_attention_fwd": (2, 2, (3, 4)),
    "packed_attention_dq": (3, 2, (3, 4)),
    "packed_attention_dkv": (4, 2, (2, 5)),
}
CUDNN = re.compile("cudnn_attention_(fwd|bwd)")
CUDNN_PRODUCTS = {"fwd": 2, "bwd": 5}  # query-key products; backward recomputes the scores
# Tokens of the blocks that a GPU computes at a time: one of 128 or two of 64 on each of 132 cores.
IN_FLIGHT = 132 * 128
PAGED = re.compile("ragged_paged_attention|paged_attention_triton")
DELTA_STEP = re.compile("gated_delta_step_(tpu|gpu)")
GROUPED = re.compile(r"grouped_matmul_(rows|weights)_(\d+)x(\d+)")  # and the size of a tile
GROUPED_TPU = re.compile("grouped_matmul_stack|ragged-dot-none")


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """One call of a kernel on one device."""

    flops: float
    dtype: str  # of the operands of its matrix products
    extra_bytes: float  # of HBM, beyond reading every operand and writing every result once
    l2_bytes: float = 0.0  # read again from the L2 cache
    attention: bool = False  # of packed sequences


def attention_work(
    op_name: str,
    operands: Sequence[HloShape],
    results: Sequence[HloShape],
    keys: float,
    l2_cache_bytes: float = 0.0,
) -> KernelWork | None:
    """Training attention (kernels/attention/splash.py, triton.py); a query attends to `keys`.

    `keys` is an average. A block of queries visits whole blocks of keys: on average an extra half
    of the block at its own end, and half a block of keys at the start of its segment, once per
    head. In the gradient of keys, a block of keys visits blocks of queries.

    What blocks read again comes from an L2 cache that holds it for the blocks computed at a time.
    These belong to one head after the other, and the last head is counted whole.
    """
    match = ATTENTION.search(op_name)
    if match is None:
        return None
    products, q_index, reread = BLOCK_WORK[match[0]]
    per_block, q = operands[0], operands[q_index]
    T = q.dims[1]  # of [N, T, H] (splash: all rows of the device) or [B, T, N, H]
    # Blocks, [B, n]; splash: the pairs of each of its blocks with the n blocks of the row.
    n_blocks, n_in_row = max(per_block.dims[1:]), min(per_block.dims[1:])
    block = T / n_blocks
    visited = BLOCK if match[1] == "packed_attention" else block
    visits = min(keys + (block + visited) / 2, (n_in_row + 1) * block / 2)
    macs = math.prod(q.dims) * visits  # of one matrix product
    sizes = [operands[i].bytes / math.prod(operands[i].dims) for i in reread if operands[i].in_hbm]
    flops, read_again = 2 * products * macs, sum(sizes) * macs / block
    working_set = (IN_FLIGHT + T) * q.dims[-1] * sum(sizes)
    if working_set <= l2_cache_bytes:
        return KernelWork(flops, q.dtype, 0.0, read_again, attention=True)
    return KernelWork(flops, q.dtype, read_again, attention=True)


def cudnn_work(
    op_name: str, operands: Sequence[HloShape], results: Sequence[HloShape], keys: float
) -> KernelWork | None:
    """cuDNN's attention (kernels/attention/cudnn.py); a query attends to `keys` on average.

    The first call counts for all segments of the rows. The work that cuDNN adds by computing in
    blocks, and the operands it reads again, are unknown.
    """
    match = CUDNN.search(op_name)
    if match is None:
        return None
    q = operands[0]
    flops = 2 * CUDNN_PRODUCTS[match[1]] * math.prod(q.dims) * min(keys, q.dims[1] / 2)
    return KernelWork(flops, q.dtype, 0.0, attention=True)


def paged_work(
    op_name: str, operands: Sequence[HloShape], results: Sequence[HloShape], keys: float
) -> KernelWork | None:
    """Paged attention (kernels/paged_attention/ragged.py, triton.py).

    A row of queries attends to `keys` on average. It reads whole pages, and only its own.
    """
    if not PAGED.search(op_name):
        return None
    # After the scalars, and before or after the positions of prefill: queries, then the pools of
    # keys and values, and of their scales.
    first, second = [i for i, operand in enumerate(operands) if len(operand.dims) == 4][:2]
    q, pools = operands[first], operands[second:]
    rows, K, M, H = q.dims
    n_pages, _, page_len, _ = pools[0].dims
    keys += page_len / 2  # of the last page
    pool_bytes = sum(pool.bytes for pool in pools)
    read = rows * keys / page_len * pool_bytes / n_pages
    return KernelWork(2 * 2 * rows * K * M * keys * H, q.dtype, read - pool_bytes)


def delta_step_work(
    op_name: str, operands: Sequence[HloShape], results: Sequence[HloShape]
) -> KernelWork | None:
    """Decode of gated DeltaNet (kernels/gated_delta/step_tpu.py, step_gpu.py).

    Of the pool of states [S, N, D, V], it reads those in the slots [B] of its rows, and writes them
    if the pool is a result too. Its products are of single vectors.
    """
    if not DELTA_STEP.search(op_name):
        return None
    n_rows, pools = operands[0].dims[0], (operands[-1], *results[1:])
    unused = sum(pool.bytes * (1 - n_rows / pool.dims[0]) for pool in pools if pool.in_hbm)
    return KernelWork(0.0, pools[0].dtype, -unused)


def grouped_work(
    op_name: str,
    operands: Sequence[HloShape],
    results: Sequence[HloShape],
    l2_cache_bytes: float = 0.0,
) -> KernelWork | None:
    """Grouped products (kernels/grouped_matmul/triton.py), with equal groups.

    A tile of rows reads its rows and its group's matrix for all its columns. The rows come from the
    L2 cache again. So does the matrix if it fits into half of it; else SHARED_TILES tiles of rows
    read it once from HBM.
    """
    match = GROUPED.search(op_name)
    if match is None:
        return None
    (x, other), height, width = operands[-2:], int(match[2]), int(match[3])
    n_rows, depth = x.dims
    if match[1] == "weights":
        (_, F, D), dy = results[0].dims, other
        again = (math.ceil(F / height) - 1) * x.bytes + (math.ceil(D / width) - 1) * dy.bytes
        return KernelWork(2.0 * n_rows * F * D, x.dtype, 0.0, again)
    E, n_columns = other.dims[-3], results[0].dims[1]
    matrix_bytes = other.bytes / math.prod(other.dims[:-2])  # [E, ...] or [L, E, ...]
    n_tiles = math.ceil(n_rows / E / height)  # of a group
    matrices = min(n_rows, E) * matrix_bytes  # of groups with rows
    reads = 1
    if matrix_bytes > l2_cache_bytes / 2:
        reads = math.ceil(n_tiles / SHARED_TILES)
    again = (math.ceil(n_columns / width) - 1) * x.bytes + (n_tiles - reads) * matrices
    extra = reads * matrices - other.bytes
    return KernelWork(2.0 * n_rows * depth * n_columns, x.dtype, extra, again)


def grouped_tpu_work(
    op_name: str, operands: Sequence[HloShape], results: Sequence[HloShape]
) -> KernelWork | None:
    """Grouped products on TPU: XLA's kernel, and kernels/grouped_matmul/stack.py.

    x [M, D] by w [E, F, D] or [L, E, F, D], or in backward x by dy [M, F]. All rows count. Of w,
    every matrix of one layer is read, or as many as there are rows.
    """
    if not GROUPED_TPU.search(op_name):
        return None
    x, w = operands[-2:]
    n_out, read = w.dims[1], 1.0
    if len(w.dims) > 2:
        n_out = results[0].dims[1]
        read = min(w.dims[-3], x.dims[0]) / math.prod(w.dims[:-2])
    unread_bytes = (1 - read) * w.bytes if w.in_hbm else 0.0
    return KernelWork(2.0 * math.prod(x.dims) * n_out, x.dtype, -unread_bytes)

"""What a kernel does, of ours or of cuDNN. The compiled module shows its operands and results only, and XLA knows no more."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

from jaxrl.planner.hlo import Shape

# (op_name, operands, results) of a kernel -> what it does, None where that is not known
Kernels = Callable[[str, Sequence[Shape], Sequence[Shape]], "Work | None"]
ATTENTION = re.compile(r"(splash_mha|packed_attention)_(fwd|dq|dkv)")
# products of a block of queries with one of keys, the place of q among the operands, and those of what each visit reads
# anew: k and v, or q and dO
VISITS = {
    "splash_mha_fwd": (2, 2, (3, 4)),
    "splash_mha_dq": (3, 2, (3, 4)),
    "splash_mha_dkv": (4, 2, (2, 6)),
    "packed_attention_fwd": (2, 1, (2, 3)),
    "packed_attention_dq": (3, 1, (2, 3)),
    "packed_attention_dkv": (4, 1, (1, 4)),
}
CUDNN = re.compile("cudnn_attention_(fwd|bwd)")
CUDNN_PRODUCTS = {"fwd": 2, "bwd": 5}  # of a query with a key; backward works out scores once
PAGED = re.compile("ragged_paged_attention|paged_attention_triton")


@dataclasses.dataclass(frozen=True)
class Work:
    """One call of a kernel on one device."""

    flops: float
    dtype: str  # of the operands of its products
    more_bytes: float  # of HBM, beyond reading every operand and writing every result once


def attention_work(
    op_name: str, operands: Sequence[Shape], results: Sequence[Shape], keys: float
) -> Work | None:
    """Of training attention (kernels/attention/splash.py, triton.py), where a query sees `keys` on average.

    A block of queries visits whole blocks of keys: on average half of one more at its own end, and half of one at
    the beginning of its segment. Each head makes its own visits.
    """
    match = ATTENTION.search(op_name)
    if match is None:
        return None
    products, at, anew = VISITS[match[0]]
    by_block, q = operands[0], operands[at]
    T = q.dims[1]  # of [N, T, H] (splash: one row) or [B, T, N, H]
    block = T / by_block.dims[1]
    met = math.prod(q.dims) * min(keys + block, (T + block) / 2)  # multiply-adds of one product
    sizes = [operands[i].bytes / math.prod(operands[i].dims) for i in anew if operands[i].in_hbm]
    return Work(2 * products * met, q.dtype, sum(sizes) * met / block)


def cudnn_work(
    op_name: str, operands: Sequence[Shape], results: Sequence[Shape], keys: float
) -> Work | None:
    """Of cuDNN's calls (kernels/attention/cudnn.py), as one for all segments of the rows, where a query sees `keys` on
    average. What cuDNN computes beyond that in blocks, or reads anew, is not known."""
    match = CUDNN.search(op_name)
    if match is None:
        return None
    q = operands[0]
    flops = 2 * CUDNN_PRODUCTS[match[1]] * math.prod(q.dims) * min(keys, q.dims[1] / 2)
    return Work(flops, q.dtype, 0.0)


def paged_work(
    op_name: str, operands: Sequence[Shape], results: Sequence[Shape], keys: float
) -> Work | None:
    """Of attention over pages (kernels/paged_attention/ragged.py, triton.py), where a row of queries sees `keys` on
    average.

    It reads the row's pages whole, and of the pool nothing else.
    """
    if not PAGED.search(op_name):
        return None
    q, pools = operands[4], operands[6:]  # of keys and values, and of their scales
    rows, K, M, H = q.dims
    n_pages, _, page_len, _ = pools[0].dims
    keys += page_len / 2  # of the last page
    held = sum(pool.bytes for pool in pools)
    read = rows * keys / page_len * held / n_pages
    return Work(2 * 2 * rows * K * M * keys * H, q.dtype, read - held)

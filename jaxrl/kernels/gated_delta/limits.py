"""Sizes that the kernels of the step support, checked without importing Pallas."""

MAX_TOKENS = 8  # of one step: their loop is unrolled


def unsupported_by_triton(T: int, D: int, V: int) -> str:
    """Why a step of T tokens and states [D, V] has no kernel on GPUs; empty if it has one."""
    if any(n & (n - 1) or n < 16 for n in (D, V)):
        return f"head widths {D} and {V}, which are not powers of two from 16"
    return _too_many(T)


def unsupported_by_mosaic(T: int, D: int, V: int) -> str:
    """Why a step of T tokens and states [D, V] has no kernel on TPU; empty if it has one."""
    if D % 8 or V % 128:
        return f"head widths {D} and {V}, which are not multiples of 8 and 128"
    return _too_many(T)


def _too_many(T: int) -> str:
    return f"{T} tokens in a step, more than {MAX_TOKENS}" if T > MAX_TOKENS else ""

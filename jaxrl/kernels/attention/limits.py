"""What the Pallas kernels for packed rows support, known without an import of Pallas."""

import jax

POSITION_BITS = 16  # per position, so that splash packs two into an int32
MAX_LEN = 2**POSITION_BITS  # tokens of a row for splash
MIN_ROWS = 16  # of a tensor-core matrix product


def unsupported_by_triton(q: jax.Array) -> str | None:
    """What the kernels do not support about these queries; None if they do."""
    return unsupported_width(q.shape[-1])


def unsupported_width(H: int) -> str | None:
    """As `unsupported_by_triton`, of heads of width H. It holds for the paged kernel too."""
    if H < MIN_ROWS or H & (H - 1):
        return f"heads of width {H}, no power of two"
    return None

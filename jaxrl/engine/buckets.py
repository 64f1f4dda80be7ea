"""The shapes that programs are compiled for."""


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Sizes of the decode batch: doubling from 8 (4 where 16 are the most), and three quarters of the
    largest, where a rollout whose sequences end one by one spends most of its time. Smaller batches
    are no faster, and a single row takes another path on CPU, slow and rounded differently."""
    sizes = {max(largest, 2)} | ({largest * 3 // 4} if largest >= 32 else set())
    size = 4 if largest <= 16 else 8
    while size < largest:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def prefill_buckets(largest: int) -> tuple[int, ...]:
    """Rows of a prefill dispatch: more than these are cut into several dispatches."""
    sizes = [2]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)

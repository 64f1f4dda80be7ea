"""The running mean of curricula."""


def running_mean(old: float | None, new: float, memory: float) -> float:
    """memory * old + (1 - memory) * new, or `new` alone if there is no mean so far."""
    return new if old is None else memory * old + (1 - memory) * new

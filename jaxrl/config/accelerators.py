"""Names of the devices that a process reserves on its host."""


def resources(accelerator: str, key: str = "--accelerator") -> dict[str, int]:
    """The resources that Ray reserves on each host for "cpu", "gpu:8" or "tpu:4"."""
    kind, _, count = accelerator.partition(":")
    if kind == "cpu" and not count:
        return {"CPU": 1}
    if kind not in ("gpu", "tpu") or not count.isdigit() or int(count) < 1:
        raise ValueError(
            f"{key}={accelerator} is not known; give cpu, or gpu:N or tpu:N with the number "
            "per host"
        )
    return {"CPU": 1, kind.upper(): int(count)}

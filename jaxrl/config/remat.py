"""Which activations the backward pass recomputes: learner.remat, as in "full?first=8"."""

import dataclasses
import functools
from collections.abc import Iterator

from jaxrl.config.choices import REMATS
from jaxrl.config.plugins import read_options
from jaxrl.config.schema import did_you_mean, key


@dataclasses.dataclass(frozen=True)
class RematOptions:
    first: int = key(
        0, "Only this many layers at the start are recomputed; the others keep everything", ge=0
    )
    group: int = key(
        1, "Layers that are recomputed together: only the input of each group is kept", ge=1
    )


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """Layers `start` to `stop` (exclusive) with one policy, in groups of `group` layers."""

    start: int
    stop: int
    policy: str
    group: int

    @property
    def n_layers(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Remat:
    """A policy and the layers that it holds for."""

    policy: str  # one of REMATS
    options: RematOptions = RematOptions()

    @property
    def offloads(self) -> bool:
        """Whether the backward pass reads layer inputs from host memory."""
        return self.policy == "offload"

    def ranges(
        self, n_layers: int, start: int = 0, stop: int | None = None
    ) -> Iterator[LayerRange]:
        """The layers `start` to `stop` of all, in order and counted from `start`.

        Groups begin at `start`; a last one may be smaller.
        """
        n = (n_layers if stop is None else stop) - start
        covered = min(max((self.options.first or n_layers) - start, 0), n)
        group = self.options.group
        whole = covered - covered % group
        if whole:
            yield LayerRange(0, whole, self.policy, group)
        if covered > whole:
            yield LayerRange(whole, covered, self.policy, covered - whole)
        if n > covered:
            yield LayerRange(covered, n, "none", 1)


@functools.cache
def parse_remat(spec: str) -> Remat:
    """The Remat of "POLICY?first=N&group=N". Raises ValueError for an unknown name or option."""
    remat, errors = read_remat(spec)
    if errors:
        raise ValueError("; ".join(errors))
    return remat


def read_remat(spec: str) -> tuple[Remat, list[str]]:
    """(Remat, one line per unknown or invalid name or option)."""
    name = spec.partition("?")[0]
    found, errors = read_options(RematOptions, spec)
    if name not in REMATS:
        hint = did_you_mean(name, REMATS)
        errors = [f"{spec!r} is not known; {hint}set one of {', '.join(REMATS)}"]
    elif name == "none" and found.first and found.group == 1:
        errors.append(f"{spec!r}: none recomputes no layer; leave out first")
    return Remat(name, found), errors

"""Rotary embedding of one kind of layer, as a frozen dataclass."""

import dataclasses

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")  # of every family
LONG_ROPE = "longrope"  # Phi-3 and Phi-4-mini
PROPORTIONAL = "proportional"  # Gemma 4
NO_ROPE = "none"  # layers whose queries and keys are not rotated


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer: base period and frequency scaling."""

    theta: float = 10_000.0
    kind: str = "default"  # one of ROPE_KINDS, LONG_ROPE, PROPORTIONAL or NO_ROPE
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_len: int = 8192  # llama3, yarn, longrope: tokens of the sequences before the extension
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the transition begins and ends at whole feature pairs
    attention_factor: float = 1.0  # of rotated queries and of rotated keys
    short_factor: tuple[float, ...] = ()  # longrope: divisors up to original_len tokens
    long_factor: tuple[
        float, ...
    ] = ()  # longrope: those of longer sequences, which are unsupported
    rotary: float = 1.0  # share of a head's features, its first ones, that is rotated
    share: float = 1.0  # proportional: share of the pairs, the first ones, that is rotated
    interleaved: bool = False  # the features of a pair are adjacent, not half of them apart
    # Queries at position p are scaled by 1 + query_growth ln(1 + floor(p / original_len)).
    query_growth: float = 0.0
    # Pairs by axis of an image (time, height, width); the three positions of text are equal.
    mrope_section: tuple[int, ...] = ()
    mrope_chunked: bool = False  # the pairs of an axis are adjacent, not every third one

    def pair_axes(self, n_pairs: int) -> tuple[int, ...]:
        """The axis of an image whose position rotates each pair; () without `mrope_section`.

        Interleaved: every third pair is one of height, the one after it of width, up to their
        numbers; the others are of time. Raises ValueError if chunks are not all pairs.
        """
        if not self.mrope_section:
            return ()
        if not self.mrope_chunked:
            ends = tuple(3 * n for n in self.mrope_section)
            return tuple(i % 3 if i < ends[i % 3] else 0 for i in range(n_pairs))
        if sum(self.mrope_section) != n_pairs:
            raise ValueError(
                f"mrope_section {list(self.mrope_section)} has {sum(self.mrope_section)} pairs of "
                f"features, and {n_pairs} are rotated; use the model's own config.json"
            )
        return tuple(axis for axis, n in enumerate(self.mrope_section) for _ in range(n))


PLAIN_ROPE = Rope()

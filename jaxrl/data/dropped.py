"""Rows of a dataset that a run leaves out."""

import dataclasses


@dataclasses.dataclass
class Dropped:
    """The lengths of rows over the limit, and the errors of rows with unusable images."""

    lengths: list[int] = dataclasses.field(default_factory=list)  # of those that are too long
    errors: list[str] = dataclasses.field(default_factory=list)  # of images that cannot be used

    def __len__(self) -> int:
        return len(self.lengths) + len(self.errors)

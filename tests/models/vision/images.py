"""Images and towers of the golden files, for the tests of towers."""

import dataclasses
from pathlib import Path

import numpy as np

from jaxrl.models.vision.patches import Grid

GOLDEN = Path(__file__).parent / "golden"
TOWERS = sorted(path.name for path in GOLDEN.iterdir())


@dataclasses.dataclass(frozen=True)
class Image:
    patches: np.ndarray
    grid: Grid


def golden_images(name: str) -> tuple[list[Image], list[np.ndarray], list[np.ndarray]]:
    """(images, torch's features of each, of each the features of deepstack [n, F, O])."""
    with np.load(GOLDEN / name / "golden.npz") as saved:
        grids, patches, features = saved["grids"], saved["patches"], saved["features"]
        deep = saved["deep"] if "deep" in saved else np.zeros((0, *features.shape))
    ends = np.cumsum(grids.prod(axis=1))[:-1]
    n = len(features) / len(patches)  # tokens of a patch
    images = [
        Image(part, (int(t), int(h), int(w)))
        for part, (t, h, w) in zip(np.split(patches, ends), grids, strict=True)
    ]
    tokens = (ends * n).astype(int)
    return images, np.split(features, tokens), np.split(deep, tokens, axis=1)

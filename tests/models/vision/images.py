"""Images and towers of the golden files, for the tests of towers."""

from pathlib import Path

import numpy as np

from jaxrl.models.vision.checks import GoldenImage as Image
from jaxrl.models.vision.checks import read_golden

GOLDEN = Path(__file__).parent / "golden"
TOWERS = sorted(path.name for path in GOLDEN.iterdir())


def golden_images(name: str) -> tuple[list[Image], list[np.ndarray], list[np.ndarray]]:
    """(images, torch's features of each, of each the features of deepstack [n, F, O])."""
    golden = read_golden(GOLDEN / name)
    assert golden is not None
    sizes = np.array([len(image.patches) for image in golden.images])
    n = len(golden.features) / sizes.sum()  # tokens of a patch
    ends = np.rint(np.cumsum(sizes) * n).astype(int)[:-1]
    return (
        golden.images,
        np.split(golden.features, ends),
        np.split(golden.deep, ends, axis=1),
    )

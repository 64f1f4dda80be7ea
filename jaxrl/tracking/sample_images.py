"""The images of logged samples: small copies in the run folder, which the report shows."""

from collections.abc import Iterable
from pathlib import Path

from jaxrl.tracking.logger import warn
from jaxrl.tracking.samples import IMAGES
from jaxrl.types import ImageInput

MAX_IMAGES = 4096  # of a run; later ones are not written


def image_name(image: ImageInput) -> str:
    """The name of an image's copy below the run folder (`IMAGE_NAME`)."""
    return f"{IMAGES}/{image.digest[:16]}.jpg"


def write_images(run_dir: Path, images: Iterable[ImageInput]) -> None:
    """Writes small copies of the images that the run folder does not have yet.

    A copy that cannot be made or written is left out with a warning: the run continues.
    """
    named = {image_name(image): image for image in images if image.preview is not None}
    missing = {name: one for name, one in named.items() if not (run_dir / name).is_file()}
    if not missing:
        return
    try:
        (run_dir / IMAGES).mkdir(parents=True, exist_ok=True)
        free = MAX_IMAGES - sum(1 for _ in (run_dir / IMAGES).iterdir())
        for name, image in list(missing.items())[: max(free, 0)]:
            assert image.preview is not None
            (run_dir / name).write_bytes(image.preview())
    except (OSError, ValueError) as error:
        warn("an image cannot be copied for the report; the run continues", error)

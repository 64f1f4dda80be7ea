"""A record of the tensors that an export reads from the model folder, to notice their change.

These tensors are not parameters, so neither the devices nor checkpoints have them. The record is
in the run folder from the first start of a run.
"""

import warnings
from pathlib import Path

from jaxrl.data.digest import digest
from jaxrl.json_text import read_object
from jaxrl.models.files.atomic_folder import write_json
from jaxrl.models.files.export_form import copied_tensors, is_image_and_text
from jaxrl.models.files.quantized.tensors import FileTensor
from jaxrl.models.files.weight_files import OTHER_PARTS, drafter_layers

RECORD = "kept_tensors.json"
DIGEST_BYTES = 4096  # of each tensor


def write_record(run: Path, folder: Path, *, is_new: bool) -> None:
    """Records the tensors that exports of a run read from a model folder, when the run is new."""
    if is_new or not (run / RECORD).exists():
        write_json(run / RECORD, kept_record(folder))


def kept_record(folder: Path, *, text_only: bool = False) -> dict[str, int | str]:
    """The number of the tensors, and a hash of their names, dtypes, shapes and first bytes.

    `text_only` leaves out the parts of an image-and-text model next to its language model.
    """
    found = sorted(copied_tensors(folder, text_only=text_only).items())
    parts = (part for name, info in found for part in tensor_parts(name, info))
    return {"n_tensors": len(found), "digest": digest(parts)}


def tensor_parts(name: str, info: FileTensor) -> tuple[bytes, bytes]:
    with info.path.open("rb") as file:
        file.seek(info.start)
        start = file.read(min(info.n_bytes, DIGEST_BYTES))
    return f"{name} {info.dtype} {info.shape}".encode(), start


def warn_of_change(run: Path, folder: Path) -> None:
    """Warns if the tensors of a model folder differ from the record of a run.

    Runs of earlier versions have no record, or one without the parts next to the language model.
    Raises ValueError for a damaged record.
    """
    if not (run / RECORD).exists():
        return
    record = read_object(run / RECORD, "remove it to export without a comparison")
    now = kept_record(folder)
    if record in (now, kept_record(folder, text_only=True)):
        return
    whole = is_image_and_text(folder)
    names = ", ".join(f"{part}*" for part, kept in OTHER_PARTS.items() if kept or whole)
    names = ", ".join([names, *(f"{layer}*" for layer in drafter_layers(folder))])
    before, there = record.get("n_tensors"), now["n_tensors"]
    change = "with other values" if there == before else f"in place of {before}"
    warnings.warn(
        f"{folder} has changed since the run {run} started: it has {there} of the tensors that "
        f"exports copy ({names}) {change}. The export has these; trained weights are not affected. "
        "For an export with the former ones, restore the folder and run "
        f"python -m jaxrl.convert {run} --step=last --output=DIR",
        stacklevel=2,
    )

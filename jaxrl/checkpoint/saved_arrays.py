"""Reads the arrays of a checkpoint part by part on one host, whatever mesh wrote them."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxrl.checkpoint.checkpointer import complete_steps, verify
from jaxrl.checkpoint.errors import CheckpointError, one_line
from jaxrl.checkpoint.state_tree import by_path


class SavedArrays:
    """The arrays of a step, by key path such as "params/layers/0/attn/q/w".

    The constructor verifies the checksums. It and `parts` raise CheckpointError for a checkpoint
    that is missing or damaged. Nothing is written.
    """

    def __init__(self, directory: Path, step: int):
        self.folder = directory.absolute() / str(step)  # orbax reads no relative paths
        steps = complete_steps(directory)
        if step not in steps:
            raise CheckpointError(f"step {step} is not in {directory}; it has {_listed(steps)}")
        try:
            verify(directory, step)
            handler = ocp.PyTreeCheckpointHandler()
            saved = by_path(handler.metadata(epath.Path(self.folder / "state")).tree)
            self.shapes: dict[str, Any] = {  # leaves with shape and dtype
                name: leaf for name, leaf in saved.items() if hasattr(leaf, "shape")
            }
            metadata = json.loads((self.folder / "state" / "_METADATA").read_text())
            self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        except Exception as error:
            raise self._unreadable(error) from error

    def parts(self, name: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """(box, values) of the array, one chunk of the checkpoint at a time."""
        try:
            array = self._open(name)
            chunk, shape = array.chunk_layout.read_chunk.shape or array.shape, array.shape
            ranges = [
                [slice(i, min(i + (n or size), size)) for i in range(0, size, n or size)]
                for n, size in zip(chunk, shape, strict=True)
            ]
            for box in itertools.product(*ranges):
                yield box, np.asarray(array[box].read().result())
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unreadable(error) from error

    def read(self, name: str) -> np.ndarray:
        """The whole array."""
        shape, dtype = self.shapes[name].shape, self.shapes[name].dtype
        values = np.empty(shape, dtype)
        for box, part in self.parts(name):
            values[box] = part
        return values

    def _open(self, name: str) -> ts.TensorStore:
        base = (self.folder / "state").as_uri()
        path = name.replace("/", ".") + "/"
        store = {"driver": "ocdbt", "base": base + "/", "path": path}
        return ts.open({"driver": self._driver, "kvstore": store}, read=True, open=True).result()

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self.folder} cannot be read: {one_line(error)}")


def _listed(steps: list[int]) -> str:
    return f"the steps {', '.join(map(str, steps))}" if steps else "no checkpoint"

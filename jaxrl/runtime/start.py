"""The start of a program, before the imports that take seconds. Imports nothing heavy itself."""

import gc
import os


def begin_loading() -> None:
    """Says that the program loads, and pauses garbage collection until `end_loading`.

    Almost all objects that imports and tracing allocate are kept, and every full collection visits
    all of them: it would take 3 of 18 s of the start of a run with a full compilation cache.
    """
    print("jaxrl: loading", flush=True)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    gc.disable()


def end_loading() -> None:
    """Resumes garbage collection."""
    gc.enable()

"""The start of a program, before the imports that take seconds. Imports nothing heavy itself."""

import gc
import os

from jaxrl.ending import end_on_signals


def begin_loading() -> None:
    """Says that the program loads, and pauses garbage collection until `end_loading`.

    From now on SIGINT and SIGTERM end the program (`end_on_signals`).

    Almost all objects that imports and tracing allocate are kept, and every full collection visits
    all of them: it would take 3 of 18 s of the start of a run with a full compilation cache.
    """
    end_on_signals()
    print("jaxrl: loading", flush=True)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    gc.disable()


def end_loading() -> None:
    """Resumes garbage collection."""
    gc.enable()

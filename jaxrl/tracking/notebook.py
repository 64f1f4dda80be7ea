"""Console output in a notebook: plain lines, and bars that are updated in place."""

import contextlib
import contextvars
import html
import importlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import rich
from rich.console import Console, RenderableType

WIDTH = 110  # columns
REFRESH_S = 0.5


@contextlib.contextmanager
def plain_console() -> Iterator[None]:
    """Has rich print text in a notebook within the block, where it shows every line by itself."""
    console = rich.get_console()
    if not console.is_jupyter:
        yield
        return
    before = vars(console)
    rich.reconfigure(force_jupyter=False, force_terminal=False, width=WIDTH)
    try:
        yield
    finally:
        console.__dict__ = before


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


class NotebookLive:
    """An output of the cell that shows `render()`, updated until `stop`, which removes it."""

    def __init__(self, render: Callable[[], RenderableType]):
        self._render = render
        self._stopped = threading.Event()
        context = contextvars.copy_context()  # the kernel finds the cell of an output by it
        self._thread = threading.Thread(
            target=context.run, args=(self._refresh,), name="notebook-progress", daemon=True
        )

    def start(self) -> None:
        display = importlib.import_module("IPython.display").display
        self._handle: Any = display(self._content(), raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._handle.update({"text/plain": ""}, raw=True)

    def _refresh(self) -> None:
        shown = None
        while not self._stopped.wait(REFRESH_S):
            if (content := self._content()) != shown:
                self._handle.update(content, raw=True)
                shown = content

    def _content(self) -> dict[str, str]:
        console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False)
        with console.capture() as captured:
            console.print(self._render())
        text = captured.get()
        return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}

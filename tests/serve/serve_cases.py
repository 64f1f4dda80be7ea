"""Running a server in a thread, and waiting for it."""

import contextlib
import threading
import time


@contextlib.contextmanager
def running(web, listening):
    """A server in a thread, told to stop at the end."""
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    thread.start()
    wait_until(lambda: web.started)
    try:
        yield
    finally:
        web.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def wait_until(holds, timeout_s: float = 20):
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)

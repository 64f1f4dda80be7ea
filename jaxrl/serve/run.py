"""Runs a server from the start of its process to its end."""

import argparse
import gc
import logging
import socket
import sys
from collections.abc import Callable

from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.ending import default_on_signals
from jaxrl.http.connection import HttpServer
from jaxrl.http.listener import listener, url
from jaxrl.runtime.start import end_loading
from jaxrl.trainer.memory import OutOfMemoryError, explain_out_of_memory


def run_server(
    options: argparse.Namespace,
    open_server: Callable[[socket.socket], HttpServer],
    title: Callable[[str], str],
) -> int:
    """Serves until Ctrl-C. Exit status: 0 stopped, 1 after an error with a message.

    `open_server` loads the model of a server that listens on this socket; `title` says what is
    served at an address.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        with listener(options.host, options.port) as listening:
            with explain_out_of_memory(None, None):
                web = open_server(listening)
            end_loading()
            gc.freeze()  # a full collection of jax's objects would stop all threads
            default_on_signals()  # uvicorn handles them, and raises them again after its shutdown
            listening.listen(web.config.backlog)  # whoever reads the address can connect
            print(f"{title(url(listening))}; stop with Ctrl-C", flush=True)
            web.run(sockets=[listening])
    except (ValueError, OSError, CheckpointError, OutOfMemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # after the shutdown of all requests
        pass
    return 0

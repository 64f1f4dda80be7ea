"""The socket on which a server listens, and who can reach it."""

import ipaddress
import socket


def listener(host: str, port: int) -> socket.socket:
    """A socket, bound before the model is loaded; it refuses clients until the server listens."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(
            f"cannot listen on {host}, port {port} ({error.strerror or error}); set another --port "
            "or --host"
        ) from error
    return listening


def require_loopback(listening: socket.socket, advice: str) -> None:
    """Raises ValueError, with the advice, if other machines can reach the socket."""
    address = listening.getsockname()[0]
    if not ipaddress.ip_address(address).is_loopback:
        raise ValueError(f"other machines can reach {address}; {advice}")


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"

"""The newest metrics of a run, served to Prometheus over HTTP."""

import re
import socket
import time
from typing import Any

from jaxrl.config.keys import LogConfig
from jaxrl.tracking.packages import require_package


def check_port(host: str, port: int) -> None:
    """Raises ValueError if the port cannot be bound."""
    try:
        socket.create_server((host, port), family=address_family(host)).close()
    except OSError as error:
        raise ValueError(
            f"port {port} of {host} cannot be used for metrics ({error.strerror or error}); set "
            "config.log.prometheus_port to another port, or to 0 for none, and "
            "config.log.prometheus_host to an address of this machine"
        ) from error


def address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def gauge_name(metric: str) -> str:
    """ "loss/kl" -> "jaxrl_loss_kl"."""
    return "jaxrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


class PrometheusLogger:
    """One gauge per metric with the label `run`, and gauges of the step and its time."""

    def __init__(self, cfg: LogConfig, name: str, total_steps: int):
        """Starts the server. Raises OSError if the port is in use."""
        self._client, self._name = require_package("prometheus_client", "prometheus"), name
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}  # prometheus_client.Gauge, which is an extra
        self._set("total_steps", total_steps, "steps of the run")
        self._server, self._thread = self._client.start_http_server(
            cfg.prometheus_port, addr=cfg.prometheus_host, registry=self._registry
        )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._set("step", step, "steps done")
        self._set("last_log_timestamp_seconds", time.time(), "when metrics were logged last")
        for name, value in values.items():
            self._set(name, value, name)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        """Ignored: Prometheus stores numbers only."""

    def text(self, text: str) -> None:
        """Ignored: Prometheus stores numbers only."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, metric: str, value: int | float, meaning: str) -> None:
        name = gauge_name(metric)
        if name not in self._gauges:
            gauge = self._client.Gauge(name, meaning, ["run"], registry=self._registry)
            self._gauges[name] = gauge.labels(self._name)
        self._gauges[name].set(value)

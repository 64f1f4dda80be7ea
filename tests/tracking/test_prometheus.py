"""Tests of jaxrl/tracking/prometheus.py: the newest metrics over HTTP, on loopback."""

import math
import socket
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl.config.keys import LogConfig, RunConfig
from jaxrl.tracking.loggers import check_loggers, make_loggers
from jaxrl.tracking.prometheus import gauge_name


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"my run"}
    return {sample.name: sample.value for sample in samples}


def test_the_newest_metrics_are_served_until_the_run_ends(port, tmp_path):
    cfg = LogConfig(loggers=(), prometheus_port=port)
    check_loggers(cfg)
    logger = make_loggers(cfg, tmp_path, RunConfig(name="my run", total_steps=9), None)
    assert scrape(port) == {"jaxrl_total_steps": 9}
    for step in (1, 2):
        logger.metrics(step, {"reward/mean": step / 4, "val/pass_at_4": math.nan})
    found = scrape(port)
    assert (found["jaxrl_step"], found["jaxrl_reward_mean"]) == (2, 0.5)
    assert math.isnan(found["jaxrl_val_pass_at_4"])
    assert found["jaxrl_last_log_timestamp_seconds"] > 1e9
    logger.close()
    check_loggers(cfg)  # the port is free again


def test_a_port_in_use_is_refused_with_the_remedy(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ValueError, match=rf"port {port} of 127\.0\.0\.1 .*log\.prometheus_port"),
    ):
        check_loggers(LogConfig(loggers=(), prometheus_port=port))


def test_the_missing_package_is_refused_with_its_extra(monkeypatch, port):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"uv pip install .prometheus-client"):
        check_loggers(LogConfig(loggers=(), prometheus_port=port))


def test_names_of_metrics_become_names_of_gauges():
    assert gauge_name("val/gsm8k/pass@4") == "jaxrl_val_gsm8k_pass_4"

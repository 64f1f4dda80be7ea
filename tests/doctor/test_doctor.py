"""The doctor: what its table has and leaves out, and what makes it fail."""

import json
import os
import urllib.error
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxrl.doctor import __main__ as doctor
from jaxrl.doctor import finding, machine, self_test
from jaxrl.doctor.arguments import parser
from jaxrl.doctor.operations import Operation
from jaxrl.runtime.backend import BackendError


@pytest.fixture
def no_network(monkeypatch):
    def refuse(address, timeout):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(machine.urllib.request, "urlopen", refuse)


def test_a_table_without_the_home_folder_passwords_and_tokens(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    text = "/home/ada/runs:/home/adam https://u:pw@host/x token=abc hf_abcdefgh123"
    assert finding.without_secrets(text) == "~/runs:/home/adam https://***@host/x token=*** ***"


def test_environment_variables_that_matter_are_listed_and_secret_ones_are_not():
    env = {
        "XLA_FLAGS": "--a",
        "LD_LIBRARY_PATH": "/opt",
        "HF_TOKEN": "t",
        "WANDB_API_KEY": "k",
        "JAX_SECRET": "s",
        "EDITOR": "vi",
    }
    names = [one.name for one in machine.variable_findings(env)]
    assert names == ["LD_LIBRARY_PATH", "XLA_FLAGS"]


def test_a_disk_without_room_fails(monkeypatch, tmp_path):
    usage = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    rows = {one.name: one for one in machine.disk_findings(tmp_path / "runs")}
    assert rows["run folder"].status == "failed" and "config.run_dir" in rows["run folder"].text
    assert rows["compilation cache"].status == "failed"


def test_a_hub_that_does_not_answer_is_a_warning(no_network):
    found = machine.hub_finding()
    assert found.status == "warning" and "HF_ENDPOINT" in found.text


def test_devices_that_cannot_be_opened_fail_and_the_facts_stay(monkeypatch, no_network, capsys):
    def refuse():
        raise BackendError("JAX cannot use the TPU: end it with `kill 7`")

    monkeypatch.setattr(doctor, "open_backend", refuse)
    monkeypatch.setattr(doctor, "open_cache", lambda setting: "")
    assert doctor.main(parser().parse_args(["--json"])) == 1
    report = json.loads(capsys.readouterr().out)
    rows = {(row["section"], row["name"]): row for row in report["findings"]}
    assert rows["devices", "JAX"]["text"].endswith("kill 7`") and not report["passed"]
    assert rows["versions", "jax"]["text"] == jax.__version__
    assert doctor.main(parser().parse_args([])) == 1
    shown = capsys.readouterr().out
    assert "kill 7" in shown and "failed: JAX" in shown and os.path.expanduser("~") not in shown


def test_the_kernel_of_every_operation_is_listed(monkeypatch, no_network, capsys):
    monkeypatch.setattr(doctor, "open_cache", lambda setting: "")
    chosen = [
        Operation("products", "xla", "XLA's own", ["xla"], (), lambda name: lambda: 0),
    ]
    monkeypatch.setattr(doctor, "operations", lambda platform: chosen)
    assert doctor.main(parser().parse_args(["--no-self-test"])) == 0
    shown = capsys.readouterr().out
    assert "xla: XLA's own" in shown and "all checks passed" in shown


def test_a_kernel_that_differs_or_raises_fails():
    def function(name):
        factor = {"reference": 2.0, "exact": 2.0, "wrong": 2.1, "nan": jnp.nan}
        return lambda x: x * factor[name]  # KeyError for "absent"

    names = ["exact", "wrong", "nan", "absent"]
    operation = Operation("double", "exact", "", names, (jnp.arange(4.0),), function)
    rows = [*self_test.kernel_findings(operation, "cpu")]
    assert [row.status for row in rows] == ["ok", "failed", "failed", "failed"]
    assert "largest error 5.0e-02" in rows[1].text
    assert rows[3].text == "KeyError: 'absent'"


def test_an_update_that_differs_from_the_stored_numbers_fails(monkeypatch):
    close = {name: value * 1.0001 for name, value in self_test.EXPECTED.items()}
    monkeypatch.setattr(self_test, "update_metrics", lambda dtype: close)
    assert self_test.update_finding(jnp.dtype("float32")).status == "ok"
    monkeypatch.setattr(
        self_test, "update_metrics", lambda dtype: close | {"loss/total": float("nan")}
    )
    assert self_test.update_finding(jnp.dtype("float32")).status == "failed"


def test_a_graph_that_samples_other_tokens_fails(monkeypatch):
    runs = {False: [[[3, 4]], [[3, 4]]], True: [[[3, 4]], [[3, 5]]]}
    monkeypatch.setattr(self_test, "sampled_tokens", lambda dtype, *, cuda_graph: runs[cuda_graph])
    assert self_test.graph_finding(jnp.dtype("float32")).status == "failed"
    runs[True] = runs[False]
    assert self_test.graph_finding(jnp.dtype("float32")).status == "ok"


@pytest.mark.thorough
def test_the_graph_option_changes_no_token():
    """CPU ignores it."""
    assert self_test.graph_finding(jnp.dtype("float32")).status == "ok"


@pytest.mark.thorough
def test_the_self_test_passes(no_network, monkeypatch, tmp_path):
    """On eight simulated devices, with the ring."""
    monkeypatch.setattr(doctor, "open_cache", lambda setting: "")
    found = [*doctor.findings(tmp_path, with_self_test=True)]
    assert not [one for one in found if one.status == "failed"]
    names = {one.name for one in found if one.section == self_test.SECTION}
    assert {
        "ring attention: blockwise",
        "rollout: engine",
        "products of experts: ragged_dot",
    } <= names

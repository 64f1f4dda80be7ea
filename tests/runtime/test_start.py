"""Tests of jaxrl/runtime/start.py."""

import os

import pytest

from jaxrl.runtime import start


@pytest.fixture
def begin(monkeypatch):
    """Begins on a machine with a plugin and with or without an accelerator."""
    monkeypatch.setattr(start, "end_on_signals", lambda: None)
    monkeypatch.setattr(start.gc, "disable", lambda: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def begin(*, plugin, accelerator):
        monkeypatch.setattr(start, "_has_plugin", lambda: plugin)
        monkeypatch.setattr(start, "_has_accelerator", lambda: accelerator)
        start.begin_loading()
        return os.environ.get("JAX_PLATFORMS")

    yield begin
    os.environ.pop("JAX_PLATFORMS", None)  # monkeypatch restores the value before


def test_plugins_without_their_accelerator_are_not_loaded(begin, capsys):
    assert begin(plugin=True, accelerator=False) == "cpu"
    assert "no TPU or NVIDIA GPU on this machine; JAX_PLATFORMS=cpu" in capsys.readouterr().out


@pytest.mark.parametrize("machine", [(True, True), (False, False), (False, True)])
def test_other_machines_choose_the_backend_as_jax_does(begin, capsys, machine):
    plugin, accelerator = machine
    assert begin(plugin=plugin, accelerator=accelerator) is None
    assert capsys.readouterr().out == "jaxrl: loading\n"


def test_a_platform_of_the_user_is_kept(begin, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert begin(plugin=True, accelerator=False) == "tpu"


@pytest.mark.parametrize("file", ["dev/nvidia0", "dev/accel0", "dev/vfio/3", "dev/dxg"])
def test_device_files_of_accelerators_are_found(tmp_path, file):
    assert not start._has_accelerator(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert start._has_accelerator(tmp_path)


def test_pci_devices_of_accelerators_are_found(tmp_path):
    for slot, vendor in (("00", "0x8086\n"), ("01", "0x10de\n")):
        folder = tmp_path / "sys/bus/pci/devices" / slot
        assert not start._has_accelerator(tmp_path)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor)
    assert start._has_accelerator(tmp_path)

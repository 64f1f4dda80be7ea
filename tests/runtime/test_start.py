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
        monkeypatch.setattr(start, "installed_plugins", lambda: ["tpu"] * plugin)
        monkeypatch.setattr(start, "has_accelerator", lambda: accelerator)
        monkeypatch.setattr(start, "has_gpu", lambda: False)
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
    assert not start.has_accelerator(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert start.has_accelerator(tmp_path)


def test_pci_devices_of_accelerators_are_found(tmp_path):
    for slot, vendor in (("00", "0x8086\n"), ("01", "0x10de\n")):
        folder = tmp_path / "sys/bus/pci/devices" / slot
        assert not start.has_accelerator(tmp_path)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor)
    assert start.has_accelerator(tmp_path)


@pytest.fixture
def gpu_memory(monkeypatch):
    """Sets the share with the user's variables; returns what JAX will read."""

    def gpu_memory(**variables):
        for name in start.MEMORY_VARIABLES:
            monkeypatch.setenv(name, variables.get(name, ""))
        start.set_gpu_memory()
        return {name: os.environ[name] for name in start.MEMORY_VARIABLES if os.environ[name]}

    return gpu_memory


def test_jax_takes_more_of_a_gpu_than_its_default(gpu_memory, capsys):
    assert gpu_memory() == {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", start.MEMORY_VARIABLES)
def test_a_share_of_the_user_stays_and_a_lower_one_is_named(gpu_memory, capsys, name):
    assert gpu_memory(**{name: "0.95"}) == {name: "0.95"}
    assert capsys.readouterr().out == ""
    assert gpu_memory(**{name: "0.5"}) == {name: "0.5"}
    line = f"jaxrl: {name}=0.5: JAX takes 50% of the memory of each GPU; unset it for 92%\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("text", ["most", "0", "-0.5", "nan", "inf"])
def test_a_share_that_is_none_is_refused(gpu_memory, text):
    with pytest.raises(SystemExit, match=f"XLA_CLIENT_MEM_FRACTION={text} is not a share"):
        gpu_memory(XLA_CLIENT_MEM_FRACTION=text)


def test_two_shares_are_refused(gpu_memory):
    with pytest.raises(SystemExit, match="are both set, and JAX takes one"):
        gpu_memory(XLA_CLIENT_MEM_FRACTION="0.9", XLA_PYTHON_CLIENT_MEM_FRACTION="0.8")


def test_only_nvidia_devices_are_gpus(tmp_path):
    for file in ("dev/accel0", "dev/vfio/3"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert not start.has_gpu(tmp_path)
    (tmp_path / "dev/nvidia0").touch()
    assert start.has_gpu(tmp_path)

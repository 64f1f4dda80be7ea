"""Errors of JAX, libtpu and CUDA when devices are opened (jaxrl/runtime/backend.py).

The texts are those that these libraries print.
"""

import logging

import jax
import pytest

from jaxrl import check_model
from jaxrl.runtime import backend
from jaxrl.runtime.backend import BackendError, explain, find_remedy, open_backend
from jaxrl.trainer.loop import USER_ERRORS

BUSY = (
    "ABORTED: The TPU is already in use by process with pid 2718466. Not attempting to load "
    "libtpu.so in this process."
)
TEXTS = {
    f"Unable to initialize backend 'tpu': {BUSY} (set JAX_PLATFORMS='' to automatically choose an "
    "available backend)": "JAX cannot use the TPU (Unable to initialize backend 'tpu': "
    "ABORTED: The TPU is already in use by process with pid 2718466. Not attempting to load "
    "libtpu.so in this process): one process at a time can use a TPU: wait for that process, or "
    "end it with `kill 2718466`. JAX_PLATFORMS=cpu runs on the CPU instead",
    "Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: open(/dev/vfio/1): "
    "Device or resource busy: Device or resource busy; Couldn't open iommu group /dev/vfio/1": (
        "another process uses the TPU: `sudo lsof"
    ),
    "Unable to initialize backend 'tpu': INVALID_ARGUMENT: Mismatched PJRT plugin PJRT API version "
    "(0.47) and framework PJRT API version 0.54). (you may need to uninstall the failing plugin "
    "package, or set JAX_PLATFORMS=cpu to skip this backend.)": "install both together with `uv "
    "pip install 'jax[tpu]",
    "Unable to initialize backend 'cuda': INTERNAL: CUDA error: Failed call to cuInit: "
    "CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized": "nvidia-fabricmanager",
    "Unable to initialize backend 'cuda': INTERNAL: cudaErrorInsufficientDriver : CUDA driver "
    "version is insufficient for CUDA runtime version": "the NVIDIA driver is too old",
    "Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices.": (
        "check `nvidia-smi`, CUDA_VISIBLE_DEVICES"
    ),
    "Unable to initialize backend 'cuda': Unable to load cuDNN. Is it installed?": (
        "cuDNN cannot be loaded"
    ),
    "Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: open(/dev/accel0): "
    "Operation not permitted": "start the container with its devices",
    "Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so: libtpu.so: cannot "
    "open shared object file": "libtpu is not installed",
}
OUTDATED = (
    "CUDA version check failed during initialization. CUDA backend will not be available. Error: "
    "Outdated cuDNN installation found.\nVersion JAX was built against: 91002\nMinimum supported: "
    "910\nInstalled version: 907"
)


def fail(error: Exception):
    def call(*arguments):
        raise error

    return call


@pytest.fixture
def select():
    """Sets JAX_PLATFORMS after the start."""
    before = jax.config.jax_platforms
    yield lambda platforms: jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_platforms", before)


@pytest.fixture
def on_cpu(monkeypatch, select):
    """JAX falls back to the CPU of a machine with a plugin and its accelerator."""
    select(None)
    monkeypatch.setattr(backend, "has_accelerator", lambda: True)
    monkeypatch.setattr(backend, "has_gpu", lambda: True)

    def fall_back(plugin: str, error: str, logged: str = ""):
        def default_backend():
            logging.getLogger("jax_plugins.xla_cuda13").warning(logged)
            return "cpu"

        monkeypatch.setattr(backend, "installed_plugins", lambda: [plugin])
        monkeypatch.setattr(jax, "devices", fail(RuntimeError(error)))
        monkeypatch.setattr(jax, "default_backend", default_backend)

    return fall_back


@pytest.mark.parametrize("text", TEXTS)
def test_an_error_of_jax_becomes_one_line_with_the_remedy(text, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", fail(RuntimeError(text)))
    with pytest.raises(BackendError) as error:
        open_backend()
    assert TEXTS[text] in str(error.value) and "\n" not in str(error.value)


def test_programs_print_it_without_a_traceback(monkeypatch, capsys, tmp_path):
    assert issubclass(BackendError, USER_ERRORS)
    monkeypatch.setattr(jax, "default_backend", fail(RuntimeError(next(iter(TEXTS)))))
    with pytest.raises(SystemExit):
        check_model.main(check_model.read([str(tmp_path)]))
    assert "error: JAX cannot use the TPU" in capsys.readouterr().err


def test_a_platform_without_any_device_is_named(monkeypatch, select):
    monkeypatch.setattr(jax, "default_backend", fail(AssertionError()))
    select("cuda")
    with pytest.raises(
        BackendError, match=r"NVIDIA GPU .no device for JAX_PLATFORMS=cuda.: there is no"
    ):
        open_backend()


def test_a_run_does_not_fall_back_to_the_cpu_in_silence(on_cpu):
    on_cpu("tpu", f"Backend 'tpu' failed to initialize: {BUSY}. Available backends are ['cpu']")
    with pytest.raises(BackendError, match="kill 2718466"):
        open_backend()


def test_an_outdated_library_is_named_by_the_logged_line(on_cpu):
    on_cpu("cuda", "Unknown backend cuda. Available backends are ['cpu']", OUTDATED)
    with pytest.raises(BackendError, match="cuDNN is older than jaxlib needs"):
        open_backend()


def test_an_unknown_reason_is_printed_and_the_cpu_is_used(on_cpu, capsys):
    on_cpu("tpu", "Backend 'tpu' failed to initialize: no chip on this machine")
    assert open_backend() == "cpu"
    assert "JAX runs on the CPU: Backend 'tpu' failed" in capsys.readouterr().err


def test_the_cpu_that_the_user_selects_is_used(on_cpu, select):
    on_cpu("tpu", BUSY)
    select("cpu")
    assert open_backend() == "cpu"


def test_long_reasons_are_cut_and_unknown_ones_have_no_remedy():
    assert not find_remedy("something else")
    assert len(explain("backend 'tpu' " + "x" * 5000)) < 600

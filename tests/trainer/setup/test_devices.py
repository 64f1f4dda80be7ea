"""Tests of jaxrl/trainer/setup/devices.py: configs for other devices than the attached ones."""

import pytest

from jaxrl.config.keys import MeshConfig, RunConfig
from jaxrl.trainer.setup.devices import check_attached_devices


@pytest.mark.parametrize(("backend", "names_doctor"), [("cpu", True), ("tpu", False)])
def test_a_config_for_accelerators_names_the_doctor_on_a_cpu(backend, names_doctor):
    cfg = RunConfig(mesh=MeshConfig(fsdp=16))
    with pytest.raises(ValueError, match="needs 16 devices but there are 8") as error:
        check_attached_devices(cfg, backend)
    assert ("`jaxrl doctor` shows why" in str(error.value)) == names_doctor

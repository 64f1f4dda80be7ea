"""The table of implementations: what is chosen, and what an import of the tables leaves out."""

import subprocess
import sys

import pytest

from jaxrl.kernels import attention, paged_attention, ring_attention
from jaxrl.kernels.choice import choose

NO_PALLAS = """
import sys
import jaxrl.kernels.attention, jaxrl.kernels.paged_attention, jaxrl.kernels.ring_attention
assert "jax.experimental.pallas" not in sys.modules
"""


@pytest.mark.parametrize("module", [attention, paged_attention, ring_attention])
def test_every_named_implementation_can_be_imported(module):
    for name in module.IMPLEMENTATIONS:
        found = choose("key", name, implementations=module.IMPLEMENTATIONS, defaults={})
        assert found.__name__.endswith(f"_{name}")


def test_pallas_is_imported_only_when_it_is_chosen():
    subprocess.run([sys.executable, "-c", NO_PALLAS], check=True)

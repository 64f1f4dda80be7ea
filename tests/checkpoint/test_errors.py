"""Tests of jaxrl/checkpoint/errors.py: log records of I/O that outlives a failed save."""

import asyncio
import gc

import pytest

from jaxrl.checkpoint.errors import OrbaxLogFilter

FAILS = "async def write():\n    raise ValueError('no space left')\n"


@pytest.mark.parametrize(
    "file, n_records", [("/site-packages/orbax/checkpoint/_src/serialize.py", 0), ("/own.py", 1)]
)
def test_tasks_of_orbax_that_failed_too_are_not_reported(caplog, file, n_records):
    names: dict = {}
    exec(compile(FAILS, file, "exec"), names)

    async def start_and_forget() -> None:
        task = asyncio.ensure_future(names["write"]())
        await asyncio.sleep(0.01)
        del task

    orbax = OrbaxLogFilter()
    orbax.install()
    asyncio.run(start_and_forget())
    orbax.remove()
    gc.collect()
    assert len([r for r in caplog.records if r.name == "asyncio"]) == n_records

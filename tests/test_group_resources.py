"""What a group leaves behind: nothing, however many are opened and closed, in one process and in several."""

from pathlib import Path

import helpers
import jax
import pytest
import resources_worker as worker
from test_processes import ON_CPU, launch_script

pytestmark = pytest.mark.usefixtures("native")


def test_one_process() -> None:
    worker.open_and_close(helpers.largest_size() if not ON_CPU else worker.SIZE)


@pytest.mark.skipif(not ON_CPU and jax.device_count() < 2, reason="needs two devices")
def test_two_processes() -> None:
    launch_script(Path(worker.__file__), processes=2)

"""Which devices an engine takes."""

import os
import subprocess
import sys

TAKE = (
    "from tpu_serve.config import ParallelOptions; from tpu_serve.device.devices import take_devices; "
    "print([device.platform for device in take_devices(ParallelOptions())])"
)


def test_libtpu_without_a_tpu_is_quiet():
    """The tests install libtpu for its compiler. A server started beside them must not print what libtpu says on finding no TPU."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    run = subprocess.run([sys.executable, "-c", TAKE], env=environment, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "['cpu']", "")

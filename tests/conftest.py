"""Set-up that must happen before jax is first used, and fixtures that several folders share."""

import os
import signal
from pathlib import Path

# The CPU client sizes its thread pool by this; several simulated devices on a small machine deadlock with too few threads.
os.environ.setdefault("NPROC", "24")
# Compiled programs of the tests are kept beside the repository's other caches, never among the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / ".test-cache")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("TPU_SERVE_API_KEY", None)
# Most of the run is compiling for this CPU, programs that are called a few times: LLVM need not polish them.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".rstrip()

# A run in the background may inherit an ignored SIGINT, and so would the servers and commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax

jax.config.update("jax_num_cpu_devices", 8)
# Every conversion between types is written out: a silent promotion doubles memory and hides mistakes.
jax.config.update("jax_numpy_dtype_promotion", "strict")

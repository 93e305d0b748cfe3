import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import jaxtyping
from jaxtyping import install_import_hook

# Every call of the package is checked against its annotations, shapes included, while the tests run.
install_import_hook("jaxformer", "beartype.beartype")

# A deadline would measure the machine, and the first example of a test compiles. The same examples come in every run,
# so that a change is judged by what it changed; `pytest --hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("jaxformer", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("jaxformer")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "jaxformer-test-cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000


@pytest.fixture(autouse=True)
def programs_stay_few():
    """Drops compiled programs before the process runs out of memory mappings, where LLVM would crash.

    Each compiled program maps a few regions of memory, and Linux lets a process hold 65530 (vm.max_map_count).
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(0)


@pytest.fixture
def unchecked():
    """Turns the check against annotations off: what a user gets, who has no such hook."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

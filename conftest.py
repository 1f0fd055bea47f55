"""For all tests: one thread of torch per process. They run side by side, and so do the ranks that some of them start;
with a thread a core each they would starve one another, and run into deadlines. And the GPUs of the machine are hidden,
also from the processes that tests start: tests compare with models on the CPU, and have more ranks than there are GPUs.
"""

from __future__ import annotations

import compileall
import functools
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from rollouts.doors import HOMES

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "ROLLOUTS_TESTS_SEE_GPUS" not in os.environ:  # benchmarks/gpu.py sets it
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""  # of NVIDIA, and of AMD
# pytest's plugin for logs is off, because it changes fifty loggers of torch three times a test. Like the plugin, this
# keeps what libraries log off the standard error output.
logging.lastResort = logging.NullHandler()
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # tests look at folders that they import files from
# A machine that is busy makes examples slowly; that says nothing of what they test.
settings.register_profile("ordinary", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("ordinary"), max_examples=300)
settings.load_profile("ordinary")
sys.path.append(str(Path(__file__).parent / "tests"))  # for `import forks`
pytest_plugins = ["cpu_budget", "pytester"]


ROOT = Path(__file__).parent
PACKAGES = [str(home / package) for package, home in HOMES.items()]
_freeze = gc.freeze
IMPORTS = 100  # so many modules are worth excluding


@pytest.fixture(autouse=True)
def forget_modules_of_tests(request, tmp_path_factory):
    """A file that a test wrote and imported by its name, as `broken.py`, is not the next test's module of that name.
    What a test imported, such as torch, is excluded from the garbage collections of the next ones. A test that leaves
    another handler of Ctrl-C behind fails, and not the next one.
    """
    modules, path, interrupt = set(sys.modules), list(sys.path), signal.getsignal(signal.SIGINT)
    yield
    if (left := signal.getsignal(signal.SIGINT)) is not interrupt:
        signal.signal(signal.SIGINT, interrupt)
        raise AssertionError(f"the test left {left} as the handler of SIGINT, in place of {interrupt}")
    if len(sys.modules) > len(modules) + IMPORTS and not getattr(request.module, "WHOLE_COLLECTIONS", False):
        gc.collect()
        _freeze()
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]
    # A component named by its file adds that file's folder: one of ours would make its vllm.py a library `vllm`.
    added = (written, *PACKAGES)
    sys.path[:] = [folder for folder in sys.path if folder in path or not folder.startswith(added)]


def pytest_configure(config):
    """The packages have bytecode, or each process that a test starts compiles them: half of what its imports take."""
    if not hasattr(config, "workerinput"):
        for folder in ("rollouts", "environments", "plugins"):
            compileall.compile_dir(ROOT / folder, quiet=2)


def pytest_collection_finish():
    """From here on no module that a test imports writes bytecode: tests look at folders that they import files from.
    Before, pytest keeps what it compiled of the test modules, which takes twice as long as their imports.
    """
    sys.dont_write_bytecode = True


@pytest.fixture(scope="module", autouse=True)
def quick_collections(request):
    """Garbage collections do not visit what existed before the module, such as imported packages: a quarter of a second
    each. A module with `WHOLE_COLLECTIONS` tests them.
    """
    if getattr(request.module, "WHOLE_COLLECTIONS", False):
        gc.unfreeze()
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        gc.freeze()
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def forked_checks():
    """The processes in which `rollouts check` draws and plays start as forks, with their hash seed."""
    import hash_seeds
    from rollouts_check.environments import traces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": hash_seeds.popen}))
        yield


@pytest.fixture(scope="session", autouse=True)
def metadata_read_once():
    """The entry points of a package that has not changed are read once, and the versions that a manifest names. A
    process reads those of all packages when sys.path changes, which it does with each test whose components are in a
    file. Files in site-packages do not change during the tests, and a run looks at a thousand of them.
    """
    from rollouts.plugins import index
    from rollouts.runs import manifest

    plain, found = index._read_refs, {}
    look, installed = index._stamps, sysconfig.get_path("purelib") + os.sep
    look_once = functools.cache(lambda file: look([file])[file])

    def stamps(files):
        return {file: look_once(file) if file.startswith(installed) else look([file])[file] for file in files}

    def read_refs(distribution):
        folder = getattr(distribution, "_path", None)
        if not isinstance(folder, Path):
            return plain(distribution)
        key = (folder, *index._stamps([f"{folder}/{name}" for name in index._METADATA]).values())
        if key not in found:
            found[key] = list(plain(distribution))
        return iter(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_stamps", stamps)
        patch.setattr(index, "_read_refs", read_refs)
        patch.setattr(manifest, "_version", functools.cache(manifest._version))
        yield


@pytest.fixture
def forked_ranks(monkeypatch):
    """The ranks of distributed training start as forks, which saves each of them five seconds of imports."""
    import forks
    from rollouts_fsdp import ranks

    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forks.popen}))


@pytest.fixture(scope="session")
def made_run(tmp_path_factory):
    """Makes the run that a test begins with: `made_run(["run", …], "out", code=0)`. The first call runs the command. A
    later one of the same process, with equal words and beside equal files, copies the folder and prints nothing.
    """
    import cpu_budget

    from rollouts.cli import main

    made = {}

    def make(words, out, code=0):
        beside = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
        key = (*words, code, *sorted(beside.items()))
        if key in made:
            shutil.copytree(made[key], out)
            return
        with cpu_budget.excluded():
            assert main([*words, "--out", out]) == code
        made[key] = tmp_path_factory.mktemp("made") / "run"
        shutil.copytree(out, made[key])

    return make

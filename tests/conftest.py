"""Settings for every test process."""

import contextlib
import gc
import importlib
import os
import pkgutil
import sys
import zlib
from collections import Counter
from importlib.abc import MetaPathFinder

import pytest

# Some virtual machines advertise AMX without letting processes use it, and oneDNN's bfloat16 kernels then die
# on an illegal instruction. Read by oneDNN when torch is first imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class Hidden(MetaPathFinder):
    """The fast paths are not there."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[:2] == ["slimbayes", "accelerate"]:
            raise ModuleNotFoundError(f"No module named {name!r}: it is hidden", name=name)


def pytest_addoption(parser):
    parser.addoption(
        "--without-accelerate",
        action="store_true",
        help="hide slimbayes.accelerate, and leave out the tests that are marked so: tests/test_core_alone.py",
    )


def pytest_configure(config):
    if config.option.without_accelerate:
        assert not any(name.startswith("slimbayes") for name in sys.modules)
        sys.meta_path.insert(0, Hidden())
        import slimbayes

        slimbayes.fast_paths = lambda *every, **switches: contextlib.nullcontext()  # there are none to switch
    if getattr(config.option, "numprocesses", None):
        return  # the workers wait for this process, which runs no tests
    with untraced():
        import torch._dynamo  # noqa: F401 - slimbayes does not import the compiler, and tests reset it


def pytest_sessionstart(session):
    """A JUnit report says on which versions it was made: reliability/compat.py counts it."""
    from _pytest.junitxml import xml_key

    report = session.config.stash.get(xml_key, None)
    if report is not None:
        import torch

        report.add_global_property("torch", torch.__version__)
        report.add_global_property("python", sys.version.split()[0])


def pytest_collection_finish(session):
    """Torch and ten thousand collected tests are a million objects, through which Python looked for garbage again and
    again: a tenth of the time of all tests. They stay, and what tests make is looked through less often."""
    if session.items and not session.config.option.without_accelerate:
        import slimbayes.accelerate.registry  # noqa: F401 - whichever test is first to convert a model
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="module")
def on_cpu():
    """Let "auto" choose the CPU where there is a GPU: for tests that repeat a run by hand."""
    import lightning.fabric.accelerators.cuda
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(lightning.fabric.accelerators.cuda, "num_cuda_devices", lambda: 0)
        yield


# A test whose lines are counted takes two to four times as long: Python traces those of torch and its compiler, too.
# So a case is counted if it is the first with one of its parameters' values, and of a test marked "uncounted" no case
# is, or one in so many. The others run all the same, and the coverage can only come out too low.
UNCOUNTED = pytest.StashKey[bool]()


@contextlib.contextmanager
def untraced():
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Count what runs at the import of slimbayes, and neither other packages nor the collection of tests."""
    if sys.gettrace() is None:
        return (yield)
    with untraced(), contextlib.suppress(ImportError):
        import lightning.fabric  # noqa: F401 - a test would import it, traced

    import slimbayes

    for module in pkgutil.walk_packages(slimbayes.__path__, "slimbayes."):
        if not module.name.endswith(("__main__", "._kernels")):
            importlib.import_module(module.name)
    with untraced():
        return (yield)


def pytest_collection_modifyitems(config, items):
    if config.option.without_accelerate:
        left_out = [item for item in items if item.get_closest_marker("accelerate")]
        items[:] = [item for item in items if not item.get_closest_marker("accelerate")]
        config.hook.pytest_deselected(items=left_out)
    numbers, seen = Counter(), set()
    for item in items:
        mark, name = item.get_closest_marker("uncounted"), item.nodeid.split("[")[0]
        if mark is not None:
            every = mark.kwargs.get("but", 0)  # other cases in other tests
            item.stash[UNCOUNTED] = not every or numbers[name] % every != zlib.crc32(name.encode()) % every
            numbers[name] += 1
        elif hasattr(item, "callspec"):
            values = {(name, *value) for value in item.callspec.indices.items()}
            item.stash[UNCOUNTED] = values <= seen
            seen |= values


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not item.stash.get(UNCOUNTED, False):
        return (yield)
    with untraced():  # the test alone: its fixtures may be another's
        return (yield)

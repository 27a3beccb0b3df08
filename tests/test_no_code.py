"""Loading executes no code: the source is walked for every call that could, and each that stays has its reason."""

import ast
from pathlib import Path

import pytest

import slimbayes

SOURCE = Path(slimbayes.__file__).parent
# What a module may not import, and where it may: (module, file) with the reason.
FORBIDDEN = {
    "pickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "joblib", "_pickle", "code", "codeop",
    "subprocess", "pty", "urllib", "http", "socket", "ftplib", "smtplib", "ssl", "requests", "httpx", "aiohttp",
    "xmlrpc", "ctypes", "runpy", "imp", "webbrowser", "telnetlib", "asyncio",
}  # fmt: skip
IMPORTS = {
    ("pickle", "lab/data/unpickle.py"): "CIFAR's own files, by a reader that calls nothing they name",
    (
        "pickletools",
        "lab/data/unpickle.py",
    ): "looks at the operations of such a file before any is carried out",
    ("subprocess", "verbs/provenance.py"): "asks git for the commit, with fixed words",
    ("subprocess", "lab/bench/beside.py"): "the benchmark's own processes, of this Python",
    ("subprocess", "lab/bench/running.py"): "the benchmark's own processes, of this Python",
    ("ctypes", "accelerate/cpu/__init__.py"): "the CPU kernels compiled with the package, in its own folder",
    ("ctypes", "accelerate/cpu/rows.py"): "their arguments",
    ("ctypes", "accelerate/cpu/weights.py"): "their arguments",
}
# Modules imported by a name that is no constant.
BY_NAME = {
    "__init__.py": "the package's own rooms",
    "extras.py": "optional packages, named by the code",
    "aliases.py": "modules of the package, under the names they had before they moved",
    "core/layers/table.py": "our class for a layer of torch's, named by the code",
    "lab/models/text.py": "a network of one's own, package.module:function, where the user gives it; never a saved one",
    "lab/bench/peers.py": "the peers, named by the code",
}
CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
METHODS = {
    "system", "popen", "execv", "execve", "execvp", "spawnv", "startfile", "extractall", "extract", "unpack_archive",
    "mktemp", "unsafe_load", "full_load", "load_all", "unsafe_load_all", "full_load_all", "load_module", "load_library",
    "exec_module", "read_pickle", "urlopen", "urlretrieve", "load_state_dict_from_url", "hf_hub_download",
    "snapshot_download", "CDLL",
}  # fmt: skip
METHOD_PLACES = {
    ("hf_hub_download", "integrations/hub.py"): "from_pretrained of a repository, which the user names",
    (
        "CDLL",
        "accelerate/cpu/__init__.py",
    ): "the CPU kernels that were compiled with the package, in its own folder",
    ("system", "verbs/provenance.py"): "platform.system(), the name of this machine's system",
}


def findings(tree, file):
    """What could run code or reach the network, as sentences."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in {n.split(".")[0] for n in names} & FORBIDDEN:
                if (name, file) not in IMPORTS and not (isinstance(node, ast.ImportFrom) and node.level):
                    yield f"{file}:{node.lineno} imports {name}"
        if isinstance(node, ast.Call):
            found = suspicious(node, file)
            if found:
                yield f"{file}:{node.lineno} {found}"


def suspicious(call, file):
    """Why a call may not be there, or None."""
    words = {keyword.arg: keyword.value for keyword in call.keywords}
    if isinstance(words.get("shell"), ast.Constant) and words["shell"].value:
        return "starts a shell"
    if isinstance(words.get("trust_remote_code"), ast.Constant) and words["trust_remote_code"].value:
        return "trusts remote code"
    if isinstance(call.func, ast.Name):
        if call.func.id == "import_module":
            return by_name(call, file)
        return f"calls {call.func.id}" if call.func.id in CALLS else None
    if not isinstance(call.func, ast.Attribute):
        return None
    name, owner = call.func.attr, ast.unparse(call.func.value)
    if name in METHODS and (name, file) not in METHOD_PLACES:
        return f"calls {owner}.{name}"
    if name == "import_module":
        return by_name(call, file)
    if name == "load" and (owner in ("np", "numpy") or owner.startswith("np.")):
        safe = isinstance(words.get("allow_pickle"), ast.Constant) and words["allow_pickle"].value is False
        return None if safe else "calls np.load without allow_pickle=False"
    if name in ("load", "hub") and owner.split(".")[0] == "torch":
        return f"calls {owner}.{name}, which unpickles"
    if name == "load" and "yaml" in owner:
        safe = len(call.args) == 2 and ast.unparse(call.args[1]) == "yaml_loader()"
        return None if safe else "calls yaml.load without the safe loader"
    if name == "open" and owner in ("image", "Image", "PIL.Image"):
        return None if "formats" in words else "opens an image of any format: some start other programs"
    return None


def by_name(call, file):
    if isinstance(call.args[0], ast.Constant) or file in BY_NAME:
        return None
    # f"torch_uncertainty.{part}": the package is a constant
    return f"imports a module by {ast.unparse(call.args[0])}"


def test_no_call_in_the_source_can_run_what_a_file_holds():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 300
    found = []
    for path in files:
        file = path.relative_to(SOURCE).as_posix()
        found += findings(ast.parse(path.read_text(encoding="utf-8")), file)
    assert found == []


def test_every_exception_is_used():
    """An allowance that nothing needs would hide the next thing."""
    used = set()
    for name, file in IMPORTS:
        tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
        used |= {
            (a.name, file)
            for n in ast.walk(tree)
            if isinstance(n, ast.Import)
            for a in n.names
            if a.name == name
        }
    assert used == set(IMPORTS)
    for name, file in (*(("import_module", file) for file in BY_NAME), *METHOD_PLACES):
        assert f"{name}(" in (SOURCE / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import urllib.request", "torch.load(path)", "np.load(path)",
        "np.load(path, allow_pickle=True)", "torch.load(path, weights_only=True)", "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)", "eval(text)", "exec(text)", "tar.extractall(folder)", "Image.open(path)",
        "image.open(path)", "importlib.import_module(name)", "subprocess.run(words, shell=True)", "os.system(text)",
        "torch.jit.load(path)", "torch.hub.load(name)", "_yaml().load(text, _yaml().Loader)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_check_sees_what_it_is_for(code):
    assert list(findings(ast.parse(code), "somewhere.py"))


def test_the_yaml_loader_is_the_safe_one():
    yaml = pytest.importorskip("yaml")
    from slimbayes.lab.config import yaml_loader

    loader = yaml_loader()
    assert issubclass(loader, yaml.SafeLoader)
    assert not [tag for tag in loader.yaml_constructors if tag and "python" in tag]
    assert not [tag for tag in loader.yaml_multi_constructors if tag and "python" in tag]

"""Every tensor on its way into a C kernel is checked in one place: whatever it is, the process goes on."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import cpu

NATIVE = Path(cpu.__file__).parent

# One call of every entry, by the tensors that it takes; each is replaced in its turn by one that no kernel can take.
ENTRIES = """
import math, sys, torch, warnings
from torch import Tensor
from slimbayes.accelerate import cpu
from slimbayes.accelerate.cpu import lstm, rows, weights
warnings.simplefilter("ignore")
ones = torch.ones
normal, line = rows.Source("normal", 2), rows.Shape(2, 1, True, 8)
size = (3, 4, 5)  # steps, rows, units
steps = {n: ones(3, 4, 20 if n in ("gates", "products", "made", "inputs", "inner", "outer") else 5)
         for n in "made products gates cells out grad_out grad_c inputs inner outer".split()}
wide, narrow = ones(4, 20), ones(4, 5)
ENTRIES = {
    "noise": (lambda out: cpu.noise(out, "normal", 1), [ones(9)]),
    "product": (lambda x, loc, rho, b, out: rows.product(x, loc, rho, b, normal, line, out),
                [ones(8, 3), ones(2, 3), ones(2, 3), ones(2, 3), ones(8, 3)]),
    "gradients": (lambda g, x, loc, rho, out: rows.gradients(g, x, loc, rho, normal, line, out, (True,) * 3),
                  [ones(8, 3), ones(8, 3), ones(2, 3), ones(2, 3), ones(8, 3)]),
    "factor": (lambda loc: rows.noise(normal, loc), [ones(2, 3)]),
    "fold": (lambda *given: rows.fold(*given, False),
             [ones(2, 3, 4), ones(3, 4), ones(2, 3), ones(2, 4), ones(3, 4), ones(2, 3), ones(2, 4)]),
    "kl": (lambda loc, rho: rows.normal_kl([loc], [rho], 0.0, 1.0), [ones(2, 3)] * 2),
    "kl gradients": (lambda loc, rho: rows.normal_kl_gradients([loc], [rho], 0.0, 1.0, 1.0), [ones(2, 3)] * 2),
    "lstm inputs": (lambda x, s: lstm.inputs(x, s, 4), [steps["cells"], narrow]),
    "lstm forward": (lambda *given: lstm.forward(*given)(0, -1, 0),
                     [steps["made"], steps["products"], wide, wide, wide, narrow, narrow, steps["gates"],
                      steps["cells"], steps["out"], narrow]),
    "lstm backward": (lambda *given: lstm.backward(*given)(0, -1, 0),
                      [steps["gates"], steps["cells"], narrow, steps["out"], steps["grad_out"], steps["grad_c"],
                       narrow, steps["products"], steps["inputs"], wide, wide, narrow, narrow, steps["inner"],
                       steps["outer"], wide, wide, narrow, wide]),
    "weights": (lambda m, rho: weights.sample([(m, rho)], [False], 2, 1, [0.0]), [ones(2, 3)] * 2),
    "tied weights": (lambda m, u, v: weights.sample([(m, u, v)], [False], 2, 1, [0.0]),
                     [ones(2, 3), ones(2, 2), ones(3, 2)]),
    "weight gradients": (
        lambda m, u, v, g: weights.gradients([(m, u, v)], [False], 2, 1, [g], [(True,) * 3], [weights.NO_PULL]),
        [ones(2, 3), ones(2, 2), ones(3, 2), ones(2, 2, 3)]),
}
class Wrapper(Tensor):  # of no memory
    @staticmethod
    def __new__(cls, like):
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.contiguous.default:
            return args[0]
        raise RuntimeError("a subclass that knows no operations")
def fake(x):
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)
def batched(run, x):
    torch.vmap(lambda one: (run(one), one)[1])(torch.stack([x, x]))
def tracked(run, x):
    torch.func.grad(lambda one: (run(one), one.sum())[1])(x)
def plainly(change):
    return lambda run, x: run(change(x))
KINDS = {
    "meta": plainly(lambda x: x.to("meta")),
    "double": plainly(lambda x: x.double()),
    "half": plainly(lambda x: x.half()),
    "integer": plainly(lambda x: x.int()),
    "complex": plainly(lambda x: x.to(torch.complex64).conj()),
    "zero": plainly(lambda x: torch._efficientzerotensor(x.shape)),
    "empty": plainly(lambda x: x[..., :0]),
    "shorter": plainly(lambda x: x[:-1].contiguous()),
    "sparse": plainly(lambda x: x.to_sparse()),
    "fake": plainly(fake),
    "wrapper": plainly(Wrapper),
    "vmap": batched,
    "grad": tracked,
}
"""

REFUSED = (
    ENTRIES
    + """
for kind, hand in KINDS.items():
    for name, (call, given) in ENTRIES.items():
        for i in range(len(given)):
            def run(bad):
                call(*[bad if i == j else x.clone() for j, x in enumerate(given)])
            print(kind, name, i, end=" ", flush=True)
            try:
                hand(run, given[i].clone())
                print("taken", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)
"""
)


@pytest.mark.skipif(cpu._load() is None, reason="the kernels are not compiled")
def test_what_kernels_cannot_take_is_refused():
    """In a process of its own, which would end where a kernel is handed an address that is none."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    *_, last = done.stdout.splitlines()
    assert done.returncode == 0, f"ended after {last!r}: {done.stderr[-2000:]}"
    taken = {line.removesuffix(" taken") for line in done.stdout.splitlines() if line.endswith("taken")}
    assert taken == TAKEN


# A tensor that is to be filled, or that says how long what is made shall be, may have another length.
TAKEN = {f"{kind} {name} 0" for kind in ("empty", "shorter") for name in ("noise", "factor", "lstm inputs")}
TAKEN |= {"zero factor 0", "shorter lstm forward 0"}


def test_one_place_hands_addresses_to_the_kernels():
    """No other line of the library asks for an address, so that none can leave the check out."""
    asking = {}
    for path in NATIVE.parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = [
            n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("slimbayes_")
        ]
        if path.parent != NATIVE:
            assert not called, path
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                names = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
                asking |= {function.name: path.name} if "data_ptr" in names else {}
    assert asking == {"addresses": "__init__.py", "new": "__init__.py"}


META = """
import torch, slimbayes as sb
methods = sb.Rank1(components=2), sb.MeanField(), sb.KTied(), sb.DeepEnsemble(2), sb.EMP(2), sb.BatchEnsemble(2)
for method in methods:
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)]
    net = sb.bayesianize(torch.nn.Sequential(*layers), method, include=None if "Ens" in str(method) else "[03]")
    net, x = net.to("meta"), torch.randn(4, 8)
    for run in (lambda: sb.draw(net, x), lambda: sb.predict(net, x, samples=2), lambda: sb.kl(net)):
        try:
            run()
            print("taken", method)
        except ValueError as error:
            print("meta device" in str(error), method, error)
"""


def test_a_network_on_the_meta_device_is_refused_by_name():
    """The inputs are on the CPU: an error that names the device, for a draw, a prediction and the KL."""
    done = subprocess.run([sys.executable, "-c", META], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["True"] * 18, done.stdout


def test_views_whose_sign_is_their_readers_business():
    """imag of conj is minus the number in memory: kernels take its value."""
    from slimbayes.accelerate.cpu import rows

    loc, out = torch.ones(1, 1), torch.empty(1, 1)
    x = torch.tensor([[1.0 + 2.0j]]).conj().imag
    with pytest.raises(TypeError, match="no memory of its own"):
        rows.product(x, loc, None, None, rows.Source("point", 1), rows.Shape(1, 1, True, 1), out)
    net = sb.bayesianize(nn.Linear(1, 1, bias=False), sb.MeanField(stddev_init=1e-6))
    given = torch.tensor([[1.0 + 2.0j]]).conj().imag
    torch.testing.assert_close(
        sb.draw(net, given), sb.draw(net, torch.tensor([[-2.0]])), rtol=1e-3, atol=1e-3
    )

"""``slimbayes.core.custom_operation``: what ``torch.library.custom_op`` promises, kept without its price."""

import subprocess
import sys

import pytest
import torch

from slimbayes.core.custom_operation import CustomOp, operation


@operation("test_mixed", "(Tensor x, Tensor[] ys, SymInt[] sizes) -> (Tensor, Tensor[])")
def mixed(x, ys, sizes):
    return x * sum(sizes), [y + x.sum() for y in ys]


@mixed.register_fake
def _(x, ys, sizes):
    return torch.empty_like(x), [torch.empty_like(y) for y in ys]


def _keep(ctx, inputs, output):
    ctx.total = sum(inputs[2])


def _backward(ctx, grad, grads):
    return ctx.total * grad + sum(each.sum() for each in grads), list(grads), None


mixed.register_autograd(_backward, setup_context=_keep)


@operation("test_copy", "(Tensor x) -> Tensor")
def copy(x):
    return x.clone()


copy.register_fake(torch.empty_like)


@operation("test_view", "(Tensor x) -> Tensor")
def view(x):
    return x.view(-1)


def arguments():
    return torch.randn(3, requires_grad=True), [torch.randn(2, requires_grad=True) for _ in range(2)]


def both(x, ys):
    made, others = mixed(x, ys, [1, x.shape[0]])
    return made.square().sum() + sum([(other.square()).sum() for other in others])


def plain(x, ys):
    return (x * (1 + x.shape[0])).square().sum() + sum([(y + x.sum()).square().sum() for y in ys])


def test_opcheck():
    torch.library.opcheck(mixed.overload, (*arguments(), [1, 2]))
    torch.library.opcheck(copy.overload, (torch.randn(3),))
    torch.library.opcheck(torch.ops.slimbayes.test_mixed, (*arguments(), [1, 2]))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_eager_and_compiled(backend):
    x, ys = arguments()
    function = both if backend is None else torch.compile(both, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(plain(x, ys), [x, *ys])
    for _ in range(2):  # the first call makes the machinery, the second finds it
        for found, each in zip(torch.autograd.grad(function(x, ys), [x, *ys]), expected, strict=True):
            torch.testing.assert_close(found, each)
    with torch.no_grad():
        assert not function(x, ys).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(function(x, ys), plain(x, ys))


def test_gradient_of_an_operation_without_one():
    out = copy(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.backward()


def test_between_two_compiled_pieces_nothing_of_it_is_traced():
    """Called where dynamo looks at every function, as after a graph break."""

    def broken(x):
        made = copy(x + 1)
        torch._dynamo.graph_break()
        return copy(made) + 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(broken, backend="aot_eager")(x), x + 2)
    traced = torch._dynamo.utils.counters["frames"]["total"]
    assert traced == 2  # the two halves of the function


def test_shared_memory_is_refused():
    if not hasattr(torch._C, "_any_output_is_alias_to_input_or_output"):
        pytest.skip("this torch cannot tell")
    with pytest.raises(RuntimeError, match="an output of slimbayes::test_view shares memory"):
        view(torch.ones(3))


def test_writing_to_arguments_is_refused():
    with pytest.raises(ValueError, match=r"test_write.* writes to an argument: use torch.library.custom_op"):
        operation("test_write", "(Tensor(a!) x) -> ()")(copy)


def test_registered_again_as_when_a_module_is_reloaded():
    for value in (1.0, 2.0):
        again = CustomOp("test_again", "(Tensor x) -> Tensor", lambda x, value=value: x + value)
        again.register_fake(torch.empty_like)
        assert again(torch.zeros(())).item() == value
    assert repr(again) == "<slimbayes::test_again>"


def test_vmap_loops_and_autocast_leaves_types_alone():
    x = torch.randn(4, 3)
    assert torch.equal(torch.vmap(copy)(x), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert copy(x).dtype == torch.float32


def test_without_what_torch_may_change():
    """In processes of their own: importing slimbayes and a compiled step still work, by ``custom_op``."""
    gone = ("torch._compile", "torch._library", "torch._library.custom_ops")
    code = f"""
import builtins, os, torch, torch._dynamo
def step(gone):
    real = builtins.__import__
    def without(name, given=None, *rest, **named):
        if name == gone and given and given.get("__name__") == "slimbayes.core.custom_operation":
            raise ImportError(name)
        return real(name, given, *rest, **named)
    builtins.__import__ = without
    import slimbayes as sb
    from slimbayes.core import custom_operation
    builtins.__import__ = real
    assert not custom_operation.DIRECT
    net = sb.bayesianize(torch.nn.Linear(4, 3), sb.Rank1())
    loss = lambda x, y: sb.elbo(sb.draw(net, x), y, net, num_data=9000).loss
    torch.compile(loss, backend="aot_eager")(torch.randn(600, 4), torch.randint(3, (600,))).backward()
    assert net.weight.grad.isfinite().all()
torch.compile(torch.sin, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
for name in {gone}:
    child = os.fork()  # torch and its compiler are imported once for all
    if child == 0:
        step(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]

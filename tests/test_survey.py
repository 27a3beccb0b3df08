"""What is remembered of a network's modules is looked up again when one of them has changed."""

import gc
import weakref

import torch
from torch import nn

import slimbayes as sb
from slimbayes.core.conversion import converted_layers, every_module, find_record, unwrap
from slimbayes.core.walk import Survey, modules


def network():
    return sb.bayesianize(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), sb.MeanField())


def test_nothing_is_walked_through_twice():
    model = network()
    sb.draw(model, torch.zeros(2, 4))
    known = find_record(model).survey
    sb.elbo(sb.draw(model, torch.zeros(2, 4)), torch.zeros(2, dtype=torch.long), model, num_data=9)
    assert find_record(model).survey is known is not None
    assert {id(module) for module in every_module(model)} == {id(module) for module in model.modules()}


def test_every_change_is_seen():
    model = network()
    spare = sb.bayesianize(nn.Sequential(nn.Linear(5, 3)), sb.MeanField())[0]

    def replace():
        model[2] = spare

    def add():
        model[1].extra = nn.Tanh()

    def rename():
        model._modules["last"] = model._modules.pop("2")

    def retype():
        model[1].__class__ = nn.Tanh

    def other_dictionary():
        model.__dict__["_modules"] = {"0": model._modules["0"]}

    for change in (replace, add, rename, retype, other_dictionary):
        known = Survey(model)
        assert known.holds(model)
        change()
        assert not known.holds(model), change.__name__
        assert [layer for _, layer in converted_layers(model)] == [
            module for module in modules(model) if hasattr(module, "bayes")
        ]


def test_a_layer_that_is_its_own_network():
    layer = sb.bayesianize(nn.Linear(4, 3), sb.MeanField())
    assert converted_layers(layer) == [("", layer)]
    assert converted_layers(layer) == [("", layer)]  # as remembered


def test_a_network_is_freed_with_its_last_name():
    model = network()
    sb.draw(model, torch.zeros(2, 4))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None  # by its count of references: no circle through what is remembered
    finally:
        gc.enable()


def test_a_wrapper_is_looked_into():
    model = network()

    class DataParallel(nn.Module):  # by its name, as the real one
        def __init__(self, module):
            super().__init__()
            self.module = module

    assert unwrap(DataParallel(model)) is model and unwrap(model) is model
    assert len(converted_layers(DataParallel(model))) == 2

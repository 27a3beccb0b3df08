"""The rules: how a sample of the random tensors enters a layer's operation. Each is written once.

A rule is a module that holds spreads and is called with an operation and its inputs. It knows nothing of
methods, and of layers only their geometry.
"""

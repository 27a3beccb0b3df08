"""Thin bridges to other libraries, each imported by its own name and only then.

``slimbayes.integrations.lightning``, ``slimbayes.integrations.transformers``, ``slimbayes.integrations.hub``.
"""

"""The Triton programs. These modules are imported only when a kernel is about to run."""

"""The CPU kernels in C, which are optional: without a compiler slimbayes is installed without them."""

from pathlib import Path

from setuptools import Extension, setup

room = Path("src/slimbayes/accelerate/cpu")
setup(
    ext_modules=[
        Extension(
            "slimbayes.accelerate.cpu._kernels",
            sources=sorted(str(path) for path in room.glob("*.c")),
            depends=sorted(str(path) for path in room.glob("*.h")),
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ]
)

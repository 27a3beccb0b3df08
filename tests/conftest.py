"""Settings for every test process."""

import os

# Some virtual machines advertise AMX without letting processes use it, and oneDNN's bfloat16 kernels then die
# on an illegal instruction. Read by oneDNN when torch is first imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

"""For all tests: the GPUs of the machine are hidden, here and in every process that a test starts.

The tests compare with models that they compute on the CPU, and start more ranks than a machine has GPUs. So a machine
with GPUs passes the same tests as one without.
"""

import os

for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):  # of NVIDIA, and of AMD
    os.environ[name] = ""

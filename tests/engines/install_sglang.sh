#!/usr/bin/env bash
# install_sglang.sh VENV: a real SGLang server for Linux on x86-64 without a GPU, in a virtual environment of its own.
# Needs Python 3.11; takes 75 s and 2.9 GB. The package index has the wheel for CUDA only. Its CPU platform runs once the
# parts of CUDA that it imports have stand-ins (sglang_cpu_sitecustomize.py), and without what only a GPU needs.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" install -q)
"${pip[@]}" -U pip
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps sglang==0.5.23 triton==3.9.0
"${pip[@]}" transformers==5.19.0 aiohttp anthropic compressed-tensors==0.18.0 distro easydict einops fastapi gguf \
  interegular IPython llguidance msgspec numba==0.65.1 openai==2.8.0 openai-harmony==0.0.4 orjson packaging \
  partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart pyzmq regex requests scipy \
  sentencepiece setproctitle soundfile tiktoken tqdm jsonschema uvicorn uvloop watchfiles xxhash zstandard \
  apache-tvm-ffi dill httpx
"${pip[@]}" --no-deps xgrammar==0.2.7
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/sglang_cpu_sitecustomize.py" "$site/sitecustomize.py"

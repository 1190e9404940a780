#!/usr/bin/env bash
# Installs what is missing for a build ("build"), for every check as well ("all"), or for the cross build
# for 64-bit ARM that scripts/aarch64 makes ("aarch64").
# Does nothing, and needs no network, when everything is there.
set -euo pipefail

build_packages=(g++ cmake ninja-build git python3 libfmt-dev libcli11-dev nlohmann-json3-dev libhwy-dev
  libgtest-dev libopenmpi-dev openmpi-bin)
# Sanitizers with OpenMP and libFuzzer need clang; formatting and linting its tools. One build of CI
# repeats another's compiler runs: ccache.
check_packages=(clang clang-format clang-tidy libclang-rt-dev libomp-dev libbenchmark-dev ccache)
# Compiler and emulator of this machine's architecture, libraries of the other.
aarch64_packages=(g++-aarch64-linux-gnu qemu-user-static cmake ninja-build git python3 libcli11-dev
  nlohmann-json3-dev libfmt-dev:arm64 libhwy-dev:arm64 libgtest-dev:arm64 libgomp1:arm64)

case "${1:-build}" in
  build) packages=("${build_packages[@]}") ;;
  all) packages=("${build_packages[@]}" "${check_packages[@]}") ;;
  aarch64) packages=("${aarch64_packages[@]}") ;;
  *)
    echo "usage: $0 [build|all|aarch64]" >&2
    exit 2
    ;;
esac

# Elsewhere than on Debian and its descendants we cannot install, only check.
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  for tool in c++ cmake ninja git python3; do
    command -v "$tool" >/dev/null || {
      echo "moesaic: this system has no apt-get; please install by hand the equivalents of:" >&2
      echo "  ${packages[*]}" >&2
      exit 1
    }
  done
  echo "moesaic: no apt-get here; assuming these are installed: ${packages[*]}" >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "moesaic: not root and no sudo; as root, run: apt-get install ${missing[*]}" >&2
    exit 1
  }
  as_root=(sudo)
fi

echo "moesaic: installing ${missing[*]}"
if [ "${1:-build}" = aarch64 ] && ! dpkg --print-foreign-architectures | grep -qx arm64; then
  "${as_root[@]}" dpkg --add-architecture arm64
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" >/dev/null; }
# The package lists of a fresh machine are empty or old: refresh them before giving up.
apt install -y --no-install-recommends "${missing[@]}" 2>/dev/null || {
  apt update
  apt install -y --no-install-recommends "${missing[@]}"
}

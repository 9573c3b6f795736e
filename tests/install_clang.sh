#!/bin/sh
# ThreadSanitizer needs clang 22 and a symbolizer, kernels for AMD GPUs its lld. Installed by root on Debian and its kin;
# anyone else is told the line to type.
packages="clang-22 libclang-rt-22-dev lld-22"
if ! command -v llvm-symbolizer-22 >/dev/null && ! command -v llvm-symbolizer >/dev/null; then
  packages="$packages llvm-22"
elif command -v clang++-22 >/dev/null && command -v ld.lld-22 >/dev/null; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing $packages for ThreadSanitizer and for AMD targets"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  { apt-get install -y -q --no-install-recommends $packages ||
    { apt-get update -q && apt-get install -y -q --no-install-recommends $packages; }; } >"$log" 2>&1 && exit 0
  tail -3 "$log"
fi
echo "not there: $packages; ThreadSanitizer is skipped without them, AMD targets are built by ziglang"

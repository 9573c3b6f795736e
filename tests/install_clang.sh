#!/bin/sh
# The ThreadSanitizer test needs clang 22. Installed by root on Debian and its kin; anyone else is told the line to type.
packages="clang-22 libclang-rt-22-dev"
command -v clang++-22 >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing $packages for the ThreadSanitizer test"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  { apt-get install -y -q --no-install-recommends $packages ||
    { apt-get update -q && apt-get install -y -q --no-install-recommends $packages; }; } >"$log" 2>&1 && exit 0
  tail -3 "$log"
fi
echo "no clang++-22: the ThreadSanitizer test will be skipped (apt-get install $packages)"

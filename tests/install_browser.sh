#!/bin/sh
# The test of the report's page needs a browser. Installed by root on Debian and its kin; anyone else is told the line.
for name in chromium chromium-browser google-chrome; do command -v $name >/dev/null && exit 0; done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing chromium for the test of the report's page"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  { apt-get install -y -q --no-install-recommends chromium ||
    { apt-get update -q && apt-get install -y -q --no-install-recommends chromium; }; } >"$log" 2>&1 && exit 0
  tail -3 "$log"
fi
echo "no chromium: the test of the report's page will be skipped (apt-get install chromium)"

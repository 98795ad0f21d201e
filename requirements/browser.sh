#!/usr/bin/env bash
# Install Debian's Chromium for the tests of the live page and the run report. `make test-stack` calls this script. The
# script never fails, because the tests that need a browser report that it is missing.
set -euo pipefail
for name in chromium-headless-shell chromium google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
command="apt-get install -y --no-install-recommends chromium-headless-shell"
as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo -n"
if command -v apt-get >/dev/null && { [ -z "$as_root" ] || $as_root true 2>/dev/null; }; then
    echo "Installing Debian's chromium-headless-shell"
    { $as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $as_root $command -qq; } >/dev/null 2>&1 && exit 0
fi
echo "No Chromium was found, so the tests of the live page will fail. To install it: sudo $command" >&2

#!/usr/bin/env bash
# Installs Debian's packages. Their daemons start neither now nor with the machine. Needs root.
#
# usage: scripts/install.sh PACKAGE...
set -euo pipefail
policy=/usr/sbin/policy-rc.d mark="# made by scripts/install.sh"
# A killed run may have left it: no package of the machine could start its daemon.
if grep -qsF "$mark" "$policy"; then rm -f "$policy"; fi
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM HUP
    printf '#!/bin/sh\n%s\nexit 101\n' "$mark" >"$policy"
    chmod +x "$policy"
fi
enabled() { { systemctl list-unit-files --state=enabled --no-legend 2>/dev/null || true; } | awk '{ print $1 }' | sort; }
before=$(enabled)
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends "$@"
comm -13 <(echo "$before") <(enabled) | while read -r unit; do systemctl disable "$unit"; done

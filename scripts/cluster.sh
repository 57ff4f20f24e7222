#!/usr/bin/env bash
# Runs jobs on several hosts: network, mount, name and process namespaces of this machine, with a switch between them. Each host has
# its own name, /etc/hosts, /tmp, /dev/shm and sshd. It needs root; without it, it says that it skips. All that it makes is in
# namespaces: nothing of the machine's network, /etc or ssh changes, and nothing is left, also after ^C and SIGKILL. Only --install changes
# the machine.
#
# Usage: scripts/cluster.sh [OPTION...] [CASE...]
#   CASE        only cases whose name contains one of these words
#   --quick     only cases that need a few seconds each
#   --install   first installs Debian's packages of all launchers: openssh-server, MPICH, Slurm, munge, nftables. No daemon starts
#   --no-build  takes the programs as they are
#   --list      prints the names of the cases
#
# A case prints `ok NAME`, `skipped NAME: why`, or `FAILED NAME` with its output. The last line is `cases N failed N`; the status is 1
# if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/cluster/hosts.sh
for chapter in openmpi faults folders names slurm mpich; do . "scripts/cluster/$chapter.sh"; done

quick='' install='' build=1 list='' inside='' words=()
for argument; do
    case "$argument" in
        --quick) quick=1 ;;
        --install) install=1 ;;
        --no-build) build='' ;;
        --list) list=1 ;;
        --inside) inside=1 ;;
        -*) echo "$argument is not an option; see the first lines of scripts/cluster.sh" >&2; exit 2 ;;
        *) words+=("$argument") ;;
    esac
done

# The cases are the functions `case_NAME`, in the order of the chapters. Those of `--quick` are in $quick_cases.
cases() {
    sed -n 's/^case_\([a-z0-9_]*\)().*/\1/p' scripts/cluster/{openmpi,faults,folders,names,slurm,mpich}.sh | while read -r name; do
        if [ -n "$quick" ] && ! grep -qw "$name" <<<"$quick_cases"; then continue; fi
        if ((${#words[@]} == 0)); then echo "$name"; continue; fi
        for word in "${words[@]}"; do if [[ "$name" == *"$word"* ]]; then echo "$name"; break; fi; done
    done
}
if [ -n "$list" ]; then cases; exit 0; fi

if [ -z "$inside" ]; then
    skip() { echo "SKIPPED: $1"; echo "cases 0 failed 0"; exit 0; }
    [ "$(id -u)" -eq 0 ] || skip "several hosts on one machine need root"
    for tool in ip unshare nsenter setpriv pgrep ssh; do
        command -v "$tool" >/dev/null || skip "no $tool on the path (Debian: iproute2, util-linux, procps, openssh-client)"
    done
    why="$(unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc ip link add br0 type bridge 2>&1)" ||
        skip "this machine gives no namespaces with a bridge: $why"
    [ -z "$install" ] || packages
    command -v mpirun.openmpi >/dev/null || mpirun --version 2>/dev/null | grep -q "Open MPI" || skip "no Open MPI on the path"
    [ -x /usr/sbin/sshd ] || skip "no sshd; install openssh-server, or give --install"
    if [ -n "$build" ]; then
        # As in mpi-test.sh: building the tests of a program builds all programs, with the features that the tests have.
        cargo test --features mpi --test launched --test suite --no-run --quiet || exit 1
        build_for_mpich || exit 1
    fi
    # The namespaces end with the process that made them, and it ends with this one.
    setpriv --pdeathsig KILL unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc \
        bash "$PWD/scripts/cluster.sh" --inside "$@" &
    world=$!
    trap 'kill -KILL $world 2>/dev/null' EXIT
    trap 'exit 130' INT TERM HUP
    wait "$world"
    exit
fi

switch
tried=0 failed=0 skipped=0
for name in $(cases); do
    began=$SECONDS said="$scratch/said"
    timeout --kill-after 5 300 bash scripts/cluster/case.sh "$name" >"$said" 2>&1
    status=$?
    demolish
    case $status in
        0) echo "ok      $name ($((SECONDS - began)) s)" ;;
        77) echo "skipped $name: $(tail -1 "$said")"; skipped=$((skipped + 1)); continue ;;
        *)
            echo "FAILED  $name (status $status, $((SECONDS - began)) s)"
            sed 's/^/    /' "$said"
            failed=$((failed + 1))
            ;;
    esac
    grep "^note: " "$said" | sed 's/^/        /'
    tried=$((tried + 1))
done
((skipped == 0)) || echo "skipped $skipped"
echo "cases $tried failed $failed"
exit $((failed > 0))

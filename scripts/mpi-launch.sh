# Sourced by the scripts that start programs with mpirun. Ends the script, with status 0, where a tool is missing.
for tool in mpirun mpicc pgrep pkill; do
    if ! command -v "$tool" >/dev/null; then
        echo "SKIPPED: no $tool on the path; install an MPI (Open MPI or MPICH) with its headers, and procps"
        exit 0
    fi
done
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
oversubscribe=()
if mpirun --version | grep -q "Open MPI"; then oversubscribe=(--oversubscribe); fi

# launched SECONDS ARGUMENT...: runs mpirun with these arguments and prints its output. Returns its status, 124 if it took
# longer, or 125 if it hung although no rank was left: the PMIx library of some versions deadlocks when mpirun ends.
launched() {
    local seconds=$1 launcher began=$SECONDS alone=$SECONDS looks=0
    shift
    exec 3<&0 # a command in the background would read nothing otherwise
    mpirun "${oversubscribe[@]}" "$@" <&3 &
    launcher=$!
    exec 3<&-
    while kill -0 "$launcher" 2>/dev/null; do
        if ((++looks % 20 == 0)) && pgrep -P "$launcher" >/dev/null; then alone=$SECONDS; fi
        if ((SECONDS - began > seconds || SECONDS - alone > 30)); then
            pkill -KILL -P "$launcher"
            kill -KILL "$launcher"
            wait "$launcher" 2>/dev/null
            return $((SECONDS - alone > 30 ? 125 : 124))
        fi
        sleep 0.05
    done
    wait "$launcher"
}

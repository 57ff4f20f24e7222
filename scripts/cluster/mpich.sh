# Sourced by scripts/cluster.sh: MPICH, whose launcher Hydra starts its daemons over ssh.

mpich=$(command -v mpirun.mpich || true)
toy_mpich=$mpich_programs/toy-transformer

# build_for_mpich: builds the program that the cases need for MPICH, in a folder of its own. It is a second build of the workspace, since
# the two MPIs have unlike binary interfaces. MPICC names the compiler, so the machine's mpicc stays what it is.
build_for_mpich() {
    [[ "$(cases)" == *mpich* ]] || return 0
    command -v mpicc.mpich >/dev/null && [ -n "$mpich" ] || return 0
    CARGO_INCREMENTAL=0 MPICC=mpicc.mpich CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/mpich" \
        cargo build --features mpi --bin toy-transformer --quiet
}

# hydra PLACES ARGUMENT...: mpirun of MPICH on the first place.
hydra() {
    local places=$1
    shift
    [ -n "$mpich" ] || unavailable "no mpirun.mpich; install mpich and libmpich-dev, or give --install"
    [ -x "$toy_mpich" ] || unavailable "the program is not built for MPICH; run without --no-build"
    export CANDLE_DIST_TOKEN=$token
    run "$patience" "${places%%:*}" "$mpich" -launcher ssh -hosts "$places" -genv MASTER_ADDR "${places%%:*}" "$@"
}

# has_results: the job has ended, with results. Where the end of this MPI hangs, ranks say so and end with status 0, but Hydra may
# then end with a status of its own.
has_results() {
    [ "$status" -eq 0 ] || { [ "$status" -ne 124 ] && has "note: MPI did not end within"; } || { echo "MISSING: an end"; return 1; }
    once "The runs agree." && lacks "error: "
}
case_mpich_one_host() {
    make a b c && hydra a:3 -n 3 "$toy_mpich" --backend mpi --steps 10 --tp 3 && agree
}
case_mpich_2_2() {
    make a b c && hydra a:2,b:2 -n 4 "$toy_mpich" --backend mpi --steps 10 --tp 4 && has_results
}
case_mpich_2_1_1() {
    make a b c && hydra a:2,b:1,c:1 -n 4 "$toy_mpich" --backend mpi --steps 10 --tp 4 && has_results
}
# A program for one MPI under the launcher of the other is alone in its MPI.
case_mpich_program_for_another() {
    make a b c || return
    hydra a:1,b:1 -n 2 "$toy" --backend mpi --steps 2
    fails && one_error && says "MPI says rank 0 of 1, the launcher rank"
}
# The end of this MPI hangs in some runs. The program has its results by then, and does not wait for ever.
case_mpich_end() {
    local statuses=()
    make a b c || return
    for _ in 1 2 3 4 5 6; do
        hydra a:1,b:1 -n 2 "$toy_mpich" --backend mpi --steps 2 --tp 2 && has_results || return
        statuses+=("$status")
    done
    echo "note: mpirun ended with ${statuses[*]}"
}

# Sourced by scripts/cluster.sh: the commands of the README with Open MPI over ssh.

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
openmpi=$(command -v mpirun.openmpi || command -v mpirun || true)
toy=$programs/toy-transformer lm=$programs/lm
quick_cases="openmpi_2_2 openmpi_host_file debug_on_some small_shm cut_rank0_of_4 start_errors unlike_folders_resume
    own_name_is_loopback two_jobs"

# toy_on PLACES RANKS OPTION...: trains the toy on these places, and compares it with one process.
toy_on() {
    local places=$1 ranks=$2
    shift 2
    run "$patience" "${places%%:*}" "$openmpi" -H "$places" -x "MASTER_ADDR=${master:-${places%%:*}}" \
        "$toy" --backend mpi --steps 10 --tp "$ranks" "$@"
}

# losses FILE: the losses that the program wrote.
losses() { sed -n 's/.*"loss_\(first\|last\)": //p' "$1"; }

case_openmpi_2_2() {
    make a b c || return
    mkdir -p "$scratch/shared"
    toy_on a:2,b:2 4 --json "$scratch/shared/processes"
    agree || return
    # Threads have the same losses, bit by bit.
    "$toy" --steps 10 --tp 4 --json "$scratch/threads" >/dev/null
    [ "$(losses "$scratch/threads")" = "$(losses "$scratch/shared/processes")" ] || {
        echo "the losses of processes and threads differ:"
        losses "$scratch/threads"
        losses "$scratch/shared/processes"
        return 1
    }
}

case_openmpi_2_1_1() {
    make a b c && toy_on a:2,b:1,c:1 4 && agree
}

case_openmpi_pipeline() {
    make a b c && toy_on a:1,b:2,c:1 2 --pp 2 && agree
}

case_openmpi_host_file() {
    make a b c || return
    mkdir -p "$scratch/shared"
    printf 'a slots=2\nb slots=1\nc slots=2\n' >"$scratch/shared/hosts"
    run "$patience" a "$openmpi" --hostfile "$scratch/shared/hosts" -n 5 -x MASTER_ADDR=a "$toy" --backend mpi --steps 10 --tp 5
    agree
}

# Neighbors are on other hosts.
case_openmpi_cyclic() {
    make a b c || return
    run "$patience" a "$openmpi" -H a:2,b:2,c:1 --map-by node -x MASTER_ADDR=a "$toy" --backend mpi --steps 10 --tp 5
    agree
}

# A login host starts the job, and has no rank.
case_openmpi_from_another_host() {
    make a b c || return
    run "$patience" a "$openmpi" -H b:2,c:2 -x MASTER_ADDR=b "$toy" --backend mpi --steps 10 --tp 4
    agree
}

# As the launcher of an MPIJob: it has no rank, and a file names the workers in full.
full_names() { names "$1" | sed 's/ train-worker-\([0-9]\)$/ train-worker-\1.train.default.svc train-worker-\1/'; }
case_openmpi_as_mpijob() {
    named=full_names
    make launcher train-worker-0 train-worker-1 || return
    mkdir -p "$scratch/shared"
    printf 'train-worker-%d.train.default.svc slots=2\n' 0 1 >"$scratch/shared/hostfile"
    run "$patience" launcher env OMPI_MCA_orte_keep_fqdn_hostnames=true OMPI_MCA_orte_default_hostfile="$scratch/shared/hostfile" sh -c \
        "$openmpi -n 4 -x MASTER_ADDR=\$(head -n 1 $scratch/shared/hostfile | cut -d' ' -f1) $toy --backend mpi --steps 10 --tp 4"
    agree
}

# What a container has by default, and less: 64 MiB of shared memory, 64 KiB of locked memory, few open files.
case_openmpi_in_containers() {
    shm=64m
    make a b c || return
    start a "$openmpi" -H a:6,b:2 -x MASTER_ADDR=a bash -c \
        "ulimit -l 64; ulimit -n 256; exec $toy --backend mpi --runs single,tp --steps 20 --tp 8"
    sleep 8
    echo "note: /dev/shm of 6 ranks: $(on a df --output=used -h /dev/shm | tail -1 | tr -d ' ')"
    finish "$patience" && agree
}

case_openmpi_ipv4_only() {
    families=4
    make a b c && toy_on a:2,b:1,c:1 4 && agree
}

case_openmpi_ipv6_only() {
    families=6
    make a b c && toy_on a:2,b:1,c:1 4 && agree
}

# loss STEP: what the program printed for this step.
loss() { sed -n "s/^step $1 of [0-9]*: loss \([0-9.]*\),.*/\1/p" "$out"; }
close() {
    awk -v a="${1:-x}" -v b="${2:-y}" 'BEGIN { exit !(a > 0 && b > 0 && (a - b) ^ 2 < 1e-6) }' || { echo "$1 and $2 differ"; return 1; }
}

# A checkpoint of 2 + 2 ranks goes on on 1 + 1 + 1 others, as on one process.
case_save_and_resume() {
    local shared=$scratch/shared train=(train --train LICENSE-MIT --batch 12 --seq-len 32 --decay none --log-every 1) mine
    make a b c || return
    mkdir -p "$shared"
    run "$patience" a "$openmpi" -H a:2,b:2 -x MASTER_ADDR=a "$lm" "${train[@]}" --backend mpi --dp 2 --tp 2 --steps 4 \
        --save "$shared/learned"
    succeeds || return
    run "$patience" c "$openmpi" -H c:1,b:1,a:1 -x MASTER_ADDR=c "$lm" "${train[@]}" --backend mpi --dp 3 --tp 1 --steps 8 \
        --resume "$shared/learned"
    succeeds || return
    mine=$(loss 8)
    run "$patience" a "$lm" "${train[@]}" --steps 8
    succeeds && close "$mine" "$(loss 8)"
}

# TCP sends again what is lost. Not each kernel has netem, so the hosts' filters drop packets.
case_packet_loss() {
    local host
    make a b c || return
    for host in a b c; do filter "$host" accept 'iifname "eth0" numgen random mod 100 < 2 drop'; done
    toy_on a:2,b:1,c:1 4 && agree
}

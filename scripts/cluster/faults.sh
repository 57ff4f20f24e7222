# Sourced by scripts/cluster.sh: hosts that are cut, frozen or killed, networks that MPI cannot use, and little memory.

# How long a rank may live after its world has lost a host: 10 s without a heartbeat, and 2 s to tell. CI shares its cores with others,
# and a rank that gets no time judges later.
lost_after=12
[ -z "${CI:-}" ] || lost_after=30

# Settings of mpirun.
mca=()
# train PLACES RANKS OPTION...: starts a training without end, and waits until all ranks train.
train() {
    local places=$1 ranks=$2
    shift 2
    start "${places%%:*}" "$openmpi" "${mca[@]}" -H "$places" -x "MASTER_ADDR=${places%%:*}" \
        "$toy" --backend mpi --runs tp --tp "$ranks" --heads 8 --steps 1000000 "$@"
    trains toy-transformer "$ranks"
}

# ends HOST...: all ranks on these hosts end in time after what happened just now.
ends() {
    gone $((lost_after + 20)) toy-transformer "$@" || return
    echo "note: the last rank on $* ended after $took s"
    awk -v took="$took" -v most="$lost_after" 'BEGIN { exit !(took <= most) }' || { echo "MISSING: an end within $lost_after s"; return 1; }
}

# blames RANK: one rank printed the reason.
blames() {
    sleep 1
    cat "$out"
    one_error && has "rank $1 was lost" && has "no heartbeat for ${silence:-10}s"
}

# The host of rank 0 is lost, and with it mpirun. The others end by themselves.
rank0_of() {
    local what=$1 ranks=$2 places=$3
    make a b c || return
    # Each host writes what its ranks say: mpirun is gone with the first one.
    start a "$openmpi" -H "$places" --output-filename "$scratch/shared/ranks" -x MASTER_ADDR=a \
        "$toy" --backend mpi --runs tp --tp "$ranks" --heads 8 --steps 1000000
    trains toy-transformer "$ranks" || return
    "$what" a
    ends b c || { tail -n +1 "$scratch"/shared/ranks/*/*/*; return 1; }
    # Each survivor knows only of itself, so several may speak. The last one says what it did itself.
    cat "$scratch/shared/ranks"/*/"rank.$((ranks - 1))/stderr" | tee "$out"
    has "rank 0 was lost" && has "no heartbeat for 10s" || return
    ! grep -E "rank $((ranks - 1)): +no answer" "$out" || { echo "UNWANTED: a rank has no answer from itself"; return 1; }
}
case_cut_rank0_of_4() { rank0_of cut_off 4 a:1,b:2,c:1; }
case_cut_rank0_of_8() { rank0_of cut_off 8 a:2,b:3,c:3; }
case_freeze_rank0_of_4() { rank0_of freeze 4 a:1,b:2,c:1; }
case_lose_rank0_of_4() { rank0_of lose 4 a:1,b:2,c:1; }

# Another host is lost: those of rank 0 and of the others end.
other_of() {
    make a b c && train a:2,b:1,c:1 4 || return
    "$1" c
    ends a b && blames 3
}
case_cut_another() { other_of cut_off; }
case_freeze_another() { other_of freeze; }
case_lose_another() { other_of lose; }

# mpirun itself waits for the daemon of a lost host. It hears of it from TCP, in the time that it is told.
case_mpirun_after_a_cut() {
    mca=(--mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3)
    make a b c && train a:2,b:1,c:1 4 || return
    cut_off c
    local began=$SECONDS
    ends a b && finish 60 && fails && echo "note: mpirun ended after $((SECONDS - began)) s"
}

# A rank dies, its host lives: there is no silence to wait for.
case_kill_a_rank() {
    make a b c && train a:2,b:1,c:1 4 || return
    processes c -x toy-transformer | xargs -r kill -KILL
    lost_after=5
    ends a b c && finish 20 && fails && has "error: " && has "rank 3 was lost"
}

# The time of silence is the user's.
case_lost_after_4_s() {
    make a b c && train a:2,b:1,c:1 4 --lost-after 4 || return
    cut_off c
    lost_after=6 silence=4
    ends a b && blames 3
}

# A cable that is back before the time is over does no harm.
case_short_cut() {
    make a b c || return
    start a "$openmpi" -H a:1,b:1,c:1 -x MASTER_ADDR=a "$toy" --backend mpi --runs single,tp --tp 3 --steps 60
    trains toy-transformer 1 || return
    cut_off c
    sleep 4
    join_again c
    finish "$patience" && agree
}

# Rank 0's setting is that of all, whoever else has one. mpirun passes its own variables to ranks of its host.
case_debug_on_some() {
    make a b c || return
    run "$patience" a env CANDLE_DIST_DEBUG=1 "$openmpi" -H a:2,b:2 -x MASTER_ADDR=a "$toy" --backend mpi --steps 5 --tp 4
    agree || return
    run "$patience" a "$openmpi" -x MASTER_ADDR=a -H a:2,b:1 "$toy" --backend mpi --steps 5 --tp 4 : \
        -x CANDLE_DIST_DEBUG=1 -x CANDLE_SHARD_STRICT=1 -x MASTER_ADDR=a -H c:1 "$toy" --backend mpi --steps 5 --tp 4
    agree
}

# A wall that only ssh, mpirun and rank 0's port may cross. Then also MPI, in a range of ports, as the page says.
case_ports_blocked() {
    local host
    make a b c || return
    for host in a b c; do
        filter "$host" drop 'iifname "lo" accept' 'ct state established accept' 'meta l4proto { icmp, icmpv6 } accept' \
            'tcp dport { 22, 29500, 40000-40010 } accept'
    done
    run 150 a "$openmpi" --mca oob_tcp_dynamic_ipv4_ports 40000-40010 -H a:1,b:1 -x MASTER_ADDR=a -x MASTER_PORT=29500 \
        "$toy" --backend mpi --steps 5 --tp 2
    no_mpi || return
    for host in a b c; do on "$host" nft add rule inet wall in tcp dport 40100-40199 accept; done
    run "$patience" a "$openmpi" --mca oob_tcp_dynamic_ipv4_ports 40000-40010 --mca btl_tcp_port_min_v4 40100 \
        --mca btl_tcp_port_range_v4 100 -H a:1,b:1 -x MASTER_ADDR=a -x MASTER_PORT=29500 "$toy" --backend mpi --steps 5 --tp 2
    agree
}
# no_mpi: the error of a start in which MPI does not connect: it names MPI and the setting.
no_mpi() {
    fails && one_error && says "MPI did not connect the ranks within" && has "rank 0 on a at " && has "rank 1 on b at " &&
        has "btl_tcp_if_include"
}

# Docker's bridge has the same address on all hosts, and MPI tries it.
case_bridge_of_docker() {
    local host network
    make a b c || return
    for host in a b; do
        on "$host" ip link add docker0 type bridge && on "$host" ip addr add 172.17.0.1/16 dev docker0 &&
            on "$host" ip link set docker0 up || return
    done
    run 150 a "$openmpi" -H a:1,b:1 -x MASTER_ADDR=a "$toy" --backend mpi --steps 5 --tp 2
    [ "$status" -eq 0 ] || no_mpi || return
    for network in eth0 "${net4}0/24"; do
        run "$patience" a "$openmpi" --mca btl_tcp_if_include "$network" --mca oob_tcp_if_include "$network" -H a:1,b:1 \
            -x MASTER_ADDR=a "$toy" --backend mpi --steps 5 --tp 2
        agree || return
    done
}

# Containers have 64 MiB of shared memory, and some have less. Letters of a host then go another way.
case_small_shm() {
    shm=64k
    make a b c && toy_on a:2,b:2 4 && agree && says "note: shared memory on this host (/dev/shm) has"
}
case_little_shm() {
    shm=256k
    make a b c && toy_on a:3,b:2 5 && agree
}

# Heartbeats do not wait for threads that compute, here or beside.
case_heartbeats_under_load() {
    local load=() passed=0
    make a b c || return
    for _ in 1 2 3 4 5 6 7 8; do
        # It ends by itself if this script is killed.
        timeout 300 sh -c 'while :; do :; done' &
        load+=($!)
    done
    run 280 a "$openmpi" -H a:2,b:1,c:1 -x MASTER_ADDR=a "$toy" --backend mpi --runs tp --steps 30 --tp 4
    succeeds && lacks "error: " || passed=1
    kill "${load[@]}"
    return "$passed"
}

# Sourced by scripts/cluster.sh: names, addresses and ports of rank 0.

# As the installer of Debian writes it: a host's own name is a loopback address, and only the others know the true one.
debian_names() {
    local host=$1 loopback=127.0.1.1
    [ "${families:-46}" != 6 ] || loopback=::1
    names "$host" | sed "s/^[^ ]* $host\$/$loopback $host/" | awk '!seen[$0]++'
}
case_own_name_is_loopback() {
    named=debian_names
    make a b c && toy_on a:1,b:1,c:1 3 && agree
}
case_own_name_is_loopback_ipv6() {
    named=debian_names families=6
    make a b c && toy_on a:1,b:1,c:1 3 && agree
}

# Rank 0's host has two networks, and the others know it by the second address.
two_networks() { names "$1" | if [ "$1" = a ]; then cat; else sed "s/^${net4}1 a/10.211.9.1 a/;/^${net6}1 a/d"; fi; }
case_second_address() {
    named=two_networks
    make a b c || return
    for host in a b c; do on "$host" ip addr add "10.211.9.$(<"$scratch/$host/number")/24" dev eth0; done
    toy_on a:1,b:1,c:1 3 && agree
}
# And where rank 0 knows both, and the first is of no use to the others. MPI has to be told which network it may use.
both_networks() { names "$1" | sed "s/^${net4}1 a/10.211.9.1 a\n&/"; }
case_several_addresses() {
    named=both_networks
    make a b c || return
    on a ip link add eth1 type veth peer name eth2 && on a ip link set eth2 up && on a ip link set eth1 up &&
        on a ip addr add 10.211.9.1/24 dev eth1 || return
    run "$patience" a "$openmpi" --mca btl_tcp_if_include "${net4}0/24" -H a:1,b:1,c:1 -x MASTER_ADDR=a "$toy" --backend mpi --steps 10 --tp 3
    agree
}

# Two jobs at one port: one runs, the other ends with an error, and no rank is in the wrong one. Without the port both run.
case_two_jobs() {
    local first second
    make a b c || return
    start a "$openmpi" -H a:1,b:1 -x MASTER_ADDR=a -x MASTER_PORT=29500 "$toy" --backend mpi --runs tp --steps 1000000
    first=$job
    trains toy-transformer 2 || return
    run "$patience" a "$openmpi" -H a:1,c:2 -x MASTER_ADDR=a -x MASTER_PORT=29500 "$toy" --backend mpi --steps 5 --tp 3
    # The ranks of other hosts cannot know what rank 0 has found, so they speak for themselves.
    fails && says "port 29500 of a is taken by another program or job" && lacks "The runs agree" || return
    kill -0 "$first" || return
    run "$patience" a "$openmpi" -H a:1,c:2 -x MASTER_ADDR=a "$toy" --backend mpi --steps 5 --tp 3
    agree
}

# refuses TEXT ARGUMENT...: mpirun with these arguments ends with this error, and one rank prints it: others wait a second for the
# launcher to end them. The launcher may be slower under load, so there are three tries. Each failed one is a note.
refuses() {
    local text=$1 try
    shift
    for try in 1 2 3; do
        run "$patience" a "$openmpi" "$@"
        fails && says "$text" || return
        ! one_error || return 0
        echo "note: try $try: several ranks said: $text"
    done
    return 1
}

# What all ranks know alike is said once, and not by each rank.
case_start_errors() {
    local toy_4=("$toy" --backend mpi --steps 5 --tp 4 --timeout 5) toy_3=("$toy" --backend mpi --steps 5 --tp 3 --timeout 5)
    make a b c || return
    refuses "Open MPI runs the ranks on several hosts and does not say where" -H a:2,b:2 "${toy_4[@]}" || return
    refuses "rank 0 has the loopback address 127.0.0.1, but only 2 of 4 ranks are on this host" \
        -H a:2,b:2 -x MASTER_ADDR=127.0.0.1 "${toy_4[@]}" || return
    refuses "was started with other arguments than rank 0" -H a:1,b:1 -x MASTER_ADDR=a "${toy_3[@]}" : -H c:1 -x MASTER_ADDR=a "${toy_4[@]}" || return
    refuses "rank 0 cannot listen at b, which is not an address of its host" -H a:2,b:2 -x MASTER_ADDR=b "${toy_4[@]}" || return
    run "$patience" a "${toy_3[@]}"
    fails && one_error && says "no launcher's variables are set" || return
    run "$patience" a env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 "${toy_3[@]}"
    fails && one_error && says "no MPI launcher started this process" && has "Open MPI takes pmix" || return
    run "$patience" a "$openmpi" -H a:2,b:2 -x MASTER_ADDR=nobody "${toy_4[@]}"
    fails && has "nobody" || return
    run "$patience" a "$openmpi" -H a:1 -x MASTER_ADDR=a -x "CANDLE_DIST_TOKEN=$token" "${toy_3[@]}" : \
        -H b:1 -x MASTER_ADDR=a -x "CANDLE_DIST_TOKEN=another $token" "${toy_3[@]}"
    fails && says "has another secret than this process"
}

# A firewall at rank 0's host. A rank on another host says so, since rank 0 knows nothing of it.
case_rank0_unreachable() {
    make a b c || return
    filter a accept 'iifname "eth0" tcp dport 29500 drop'
    run "$patience" a "$openmpi" -H a:1,b:1 -x MASTER_ADDR=a -x MASTER_PORT=29500 "$toy" --backend mpi --steps 5 --timeout 5
    fails && says "could not reach rank 0 at"
}

# A name that comes a few seconds late, as in a cluster whose DNS has just heard of the host.
case_late_name() {
    make a b c || return
    start a "$openmpi" -H a:1,b:1 -x MASTER_ADDR=head "$toy" --backend mpi --steps 5 --tp 2
    sleep 6
    for host in a b c; do echo "${net4}1 head" >>"$scratch/$host/hosts"; done
    finish "$patience" && agree
}

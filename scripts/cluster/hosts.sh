# Sourced by scripts/cluster.sh: the hosts, and what happens to them.

# A file system of the namespaces, which all hosts see, as a shared folder of a cluster.
scratch=/run/cluster
programs=$scratch/programs mpich_programs=$scratch/mpich
# IPv4 and IPv6 addresses of the hosts, with a number at the end.
net4=10.211.8. net6=fd00:211::
# The longest wait for a job that has to end by itself.
patience=${CLUSTER_PATIENCE:-120}
token="a text that only this job knows $RANDOM$RANDOM$RANDOM"

# packages: installs what the cases need. `mpicc` and `mpirun` stay those of the MPI that they are.
packages() {
    local name chosen
    declare -A before
    chosen() { update-alternatives --query "$1" 2>/dev/null | sed -n 's/^Value: //p'; }
    for name in mpi mpirun; do before[$name]=$(chosen "$name"); done
    scripts/install.sh openssh-server openssh-client openmpi-bin libopenmpi-dev mpich libmpich-dev slurm-wlm munge libpmix2 nftables || exit 1
    for name in mpi mpirun; do
        [ -z "${before[$name]}" ] || [ "$(chosen "$name")" = "${before[$name]}" ] || update-alternatives --set "$name" "${before[$name]}"
    done
}

# switch: makes the switch between the hosts, the scratch folder, and the keys of ssh.
switch() {
    local target="${CARGO_TARGET_DIR:-target}"
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir -p "$scratch/ssh" "$scratch/tree" "$programs" "$mpich_programs" /run/sshd
    # A host has a /tmp of its own, where this tree may be.
    mount --bind "$target/debug" "$programs"
    [ ! -d "$target/mpich/debug" ] || mount --bind "$target/mpich/debug" "$mpich_programs"
    mount --bind . "$scratch/tree"
    cd "$scratch/tree" || exit 1
    ip link set lo up
    ip link add br0 type bridge forward_delay 0
    ip link set br0 up
    ssh-keygen -q -t ed25519 -N '' -f "$scratch/ssh/host"
    ssh-keygen -q -t ed25519 -N '' -f "$scratch/ssh/user"
    cp "$scratch/ssh/user.pub" "$scratch/ssh/authorized"
    cat >"$scratch/ssh/client" <<END
Host *
    User root
    IdentityFile $scratch/ssh/user
    IdentitiesOnly yes
    BatchMode yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ConnectTimeout 10
END
    cat >"$scratch/ssh/server" <<END
HostKey $scratch/ssh/host
AuthorizedKeysFile $scratch/ssh/authorized
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
END
}

# make HOST...: makes hosts with these names. Their addresses end in 1, 2, .. The size of /dev/shm is $shm, the addresses are of the
# families $families, and $named HOST prints the lines of its /etc/hosts.
make() {
    local host number=0
    hosts=("$@")
    for host; do
        number=$((number + 1))
        mkdir -p "$scratch/$host"
        echo "$number" >"$scratch/$host/number"
        echo "$host" >"$scratch/$host/hostname"
        "${named:-names}" "$host" >"$scratch/$host/hosts"
        unshare --mount --uts --ipc --pid --net --fork --kill-child bash scripts/cluster/host.sh "$host" "${shm:-512m}" \
            </dev/null >"$scratch/$host/log" 2>&1 &
        echo $! >"$scratch/$host/parent"
    done
    for host; do attach "$host" || return 1; done
}

# names HOST: the lines of /etc/hosts, equal on all hosts but for the loopback addresses.
names() {
    local host number=0
    echo "127.0.0.1 localhost"
    echo "::1 localhost ip6-localhost"
    for host in "${hosts[@]}"; do
        number=$((number + 1))
        [[ "${families:-46}" != *4* ]] || echo "$net4$number $host"
        [[ "${families:-46}" != *6* ]] || echo "$net6$number $host"
    done
}

# attach HOST: connects a host to the switch, and starts its sshd.
attach() {
    local host=$1 number init
    number=$(<"$scratch/$host/number")
    for _ in $(seq 400); do
        [ -e "$scratch/$host/ready" ] && break
        sleep 0.05
    done
    [ -e "$scratch/$host/ready" ] || { cat "$scratch/$host/log"; return 1; }
    init=$(pgrep -P "$(<"$scratch/$host/parent")") || { cat "$scratch/$host/log"; return 1; }
    echo "$init" >"$scratch/$host/init"
    ip link add "port$number" type veth peer name eth0 netns "$init" || return 1
    ip link set "port$number" master br0 up
    within() { nsenter --target "$init" --net "$@"; }
    within ip link set lo up
    within ip link set eth0 up
    [[ "${families:-46}" != *4* ]] || within ip addr add "$net4$number/24" dev eth0
    if [[ "${families:-46}" == *6* ]]; then within ip addr add "$net6$number/64" dev eth0 nodad; fi
    on "$host" /usr/sbin/sshd -f "$scratch/ssh/server" || return 1
}

# demolish: ends all hosts.
demolish() {
    local parent
    for parent in "$scratch"/*/parent; do
        [ -e "$parent" ] || continue
        kill -KILL "$(<"$parent")" 2>/dev/null
        rm -rf "${parent%/parent}"
    done
    ip -o link show type veth | sed -n 's/^[0-9]*: \(port[0-9]*\).*/\1/p' | while read -r link; do ip link del "$link" 2>/dev/null; done
    rm -rf "$scratch/shared"
    for _ in $(seq 200); do
        pkill -KILL -f "scripts/cluster/[h]ost.sh" || return 0
        sleep 0.05
    done
    echo "hosts are left that cannot be ended" >&2
}

# on HOST COMMAND...: runs a command on a host.
on() {
    local host=$1
    shift
    nsenter --target "$(<"$scratch/$host/init")" --mount --uts --ipc --net --pid --wd="$scratch/tree" -- "$@"
}

# processes HOST [NAME]: the processes of a host with this name, or all but its first one, as this script numbers them.
processes() { pgrep --ns "$(<"$scratch/$1/init")" --nslist pid "${@:2}" 2>/dev/null | grep -vx "$(<"$scratch/$1/init")"; }

# cut_off HOST; join_again HOST: takes its cable out, and in. freeze HOST: stops its processes. lose HOST: its power fails, so that
# it says nothing more. stop HOST: its kernel ends all processes and closes their connections.
cut_off() { ip link set "port$(<"$scratch/$1/number")" down; }
join_again() { ip link set "port$(<"$scratch/$1/number")" up; }
freeze() { processes "$1" . | xargs -r kill -STOP; }
lose() { cut_off "$1" && stop "$1"; }
stop() { kill -KILL "$(<"$scratch/$1/init")"; }

# filter HOST POLICY RULE...: accepts or drops what arrives at a host, as rules of nftables say.
filter() {
    local host=$1 policy=$2 rule
    shift 2
    command -v nft >/dev/null || unavailable "no nft; install nftables, or give --install"
    {
        echo "add table inet wall"
        echo "add chain inet wall in { type filter hook input priority 0; policy $policy; }"
        for rule; do echo "add rule inet wall in $rule"; done
    } | on "$host" nft -f - || unavailable "this kernel does not filter as wanted"
}

# run SECONDS HOST COMMAND...: runs a command for at most this long. Its output goes to $out and its status to $status.
run() {
    local seconds=$1 host=$2
    shift 2
    out=$(mktemp -p "$scratch")
    echo "+ $host: ${*//"$scratch"/\$scratch}"
    on "$host" timeout --kill-after 5 "$seconds" "$@" >"$out" 2>&1 </dev/null
    status=$?
    cat "$out"
    echo "+ status $status"
}

# start HOST COMMAND...: starts a command; `finish SECONDS` waits for its end, and sets $out and $status.
start() {
    local host=$1
    shift
    out=$(mktemp -p "$scratch")
    echo "+ $host: ${*//"$scratch"/\$scratch}"
    on "$host" "$@" >"$out" 2>&1 </dev/null &
    job=$!
}
finish() {
    local end=$((SECONDS + $1))
    while kill -0 "$job" 2>/dev/null && ((SECONDS < end)); do sleep 0.1; done
    if kill -0 "$job" 2>/dev/null; then
        status=124
    else
        wait "$job"
        status=$?
    fi
    cat "$out"
    echo "+ status $status"
}

# trains NAME COUNT: waits until this many processes with this name have computed for more than a second each.
trains() {
    local busy pid
    for _ in $(seq 600); do
        busy=0
        for pid in $(pgrep -x "$1"); do
            (($(awk '{ print $14 + $15 }' "/proc/$pid/stat" 2>/dev/null || echo 0) > 100)) && busy=$((busy + 1))
        done
        ((busy < $2)) || return 0
        sleep 0.1
    done
    echo "only $busy of $2 processes train"
    return 1
}

# gone SECONDS NAME HOST...: waits until no process with this name is on these hosts; prints how long it took.
gone() {
    local seconds=$1 name=$2 began host left
    shift 2
    began=$(date +%s%N)
    while :; do
        left=0
        for host; do left=$((left + $(processes "$host" -x "$name" | wc -l))); done
        took=$((($(date +%s%N) - began) / 100000000))
        took=$((took / 10)).$((took % 10))
        ((left > 0)) || return 0
        if ((${took%.*} >= seconds)); then echo "$left processes are left on $* after $took s"; return 1; fi
        sleep 0.05
    done
}

# What a job did. Each prints what it misses.
has() { grep -qF -- "$1" "$out" || { echo "MISSING: $1"; return 1; }; }
# says TEXT: the output has it, and the page explains it.
says() { has "$1" && { grep -qF -- "$1" docs/clusters.md || { echo "NOT IN docs/clusters.md: $1"; return 1; }; }; }
lacks() { ! grep -qF -- "$1" "$out" || { echo "UNWANTED: $1"; return 1; }; }
succeeds() { [ "$status" -eq 0 ] || { echo "MISSING: status 0"; return 1; }; }
fails() { { [ "$status" -ne 0 ] && [ "$status" -ne 124 ]; } || { echo "MISSING: an end with an error"; return 1; }; }
# once TEXT: a single line has it. one_error: a single rank has told why.
once() { [ "$(grep -cF -- "$1" "$out")" -eq 1 ] || { echo "WANTED ONCE: $1, found $(grep -cF -- "$1" "$out") times"; return 1; }; }
one_error() { [ "$(grep -c "^error: " "$out")" -eq 1 ] || { echo "WANTED: one error, found $(grep -c "^error: " "$out")"; return 1; }; }
agree() { succeeds && once "The runs agree."; }
unavailable() { echo "$1"; exit 77; }

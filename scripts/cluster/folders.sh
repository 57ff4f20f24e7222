# Sourced by scripts/cluster.sh: folders that hosts do not share.

lm_on() {
    local places=$1
    shift
    run "$patience" "${places%%:*}" "$openmpi" -H "$places" -x "MASTER_ADDR=${places%%:*}" "$lm" train --train LICENSE-MIT \
        --batch 4 --seq-len 32 --log-every 1 --backend mpi "$@"
}
# refused RANK HOST: an error before the first step, which names them.
refused() { fails && lacks "step 1 of" && one_error && has "rank $1 on $2"; }

# Each host has a /tmp of its own. Found before the training, not after it.
case_unlike_folders_save() {
    make a b c || return
    lm_on a:1,b:1,c:1 --tp 3 --steps 3 --save /tmp/learned
    refused 1 b && says "--save /tmp/learned is not the folder that rank 0 writes to" || return
    # Also where the folder is there on each.
    for host in a b c; do on "$host" mkdir -p /tmp/learned; done
    lm_on a:1,b:1,c:1 --tp 3 --steps 3 --save /tmp/learned
    refused 1 b
}

case_unlike_folders_resume() {
    make a b c || return
    run "$patience" a "$lm" train --train LICENSE-MIT --batch 4 --seq-len 32 --steps 2 --save /tmp/learned
    succeeds || return
    lm_on a:1,b:1,c:1 --tp 3 --steps 4 --resume /tmp/learned
    refused 1 b
}

# Sourced by scripts/cluster.sh: Slurm, with a controller on the first host and a daemon on each.

# slurm: makes three hosts that Slurm runs. They pretend to have eight processors each.
slurm() {
    local tool host waited
    for tool in srun slurmctld slurmd munged; do
        command -v "$tool" >/dev/null || unavailable "no $tool; install slurm-wlm and munge, or give --install"
    done
    srun_plugins=$(find /usr/lib -name 'mpi_pmix*.so' 2>/dev/null | head -1)
    [ -n "$srun_plugins" ] || unavailable "this Slurm has no plugin for PMIx"
    make a b c || return
    mkdir -p "$scratch/shared"
    head -c 128 /dev/urandom >"$scratch/shared/munge.key"
    chmod 600 "$scratch/shared/munge.key"
    export SLURM_CONF=$scratch/shared/slurm.conf CANDLE_DIST_TOKEN=$token
    cat >"$SLURM_CONF" <<END
ClusterName=cluster
SlurmctldHost=a
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile=$scratch/shared/slurmctld.log
SlurmdLogFile=$scratch/shared/slurmd.%n.log
SlurmdTimeout=30
SlurmctldParameters=enable_configless
NodeName=a,b,c CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    for host in a b c; do
        on "$host" munged --force --socket /tmp/munge.socket --key-file "$scratch/shared/munge.key" --pid-file /tmp/munge.pid \
            --log-file /tmp/munge.log --seed-file /tmp/munge.seed || return
    done
    on a slurmctld -f "$SLURM_CONF" || return
    for host in a b c; do on "$host" slurmd -f "$SLURM_CONF" -N "$host" || return; done
    for waited in $(seq 150); do
        [ "$(on a sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" -eq 3 ] && return
        sleep 0.2
    done
    echo "Slurm's hosts are not idle after $((waited / 5)) s"
    tail -n 20 "$scratch"/shared/slurm*.log
    return 1
}
toy_by_srun() { run "$patience" a srun --mpi=pmix "$@"; }

case_slurm_2_2() {
    slurm && toy_by_srun -N 2 -n 4 "$toy" --backend mpi --steps 10 --tp 4 && agree
}
case_slurm_uneven() {
    slurm && toy_by_srun -N 3 -n 4 "$toy" --backend mpi --steps 10 --tp 4 && agree || return
    toy_by_srun -w b,c --ntasks 4 -N 2 -m plane=3 "$toy" --backend mpi --steps 10 --tp 4 && agree
}
case_slurm_cyclic() {
    slurm && toy_by_srun -N 3 -n 5 -m cyclic "$toy" --backend mpi --steps 10 --tp 5 && agree
}
# The user's order: rank 0 is not on the first host of Slurm's list, which is sorted. That is said at once, and MASTER_ADDR helps.
case_slurm_arbitrary() {
    local began=$SECONDS
    slurm || return
    printf '%s\n' c a b c >"$scratch/shared/places"
    toy_by_srun -n 4 -m arbitrary -w "$scratch/shared/places" "$toy" --backend mpi --steps 10 --tp 4
    ((SECONDS - began < 30)) || { echo "MISSING: an answer within 30 s"; return 1; }
    [ "$status" -eq 0 ] || says "SLURM_DISTRIBUTION=arbitrary" || return
    export MASTER_ADDR=c
    toy_by_srun -n 4 -m arbitrary -w "$scratch/shared/places" "$toy" --backend mpi --steps 10 --tp 4
    agree
}
# Debian's Open MPI has no other interface than PMIx.
case_slurm_without_pmix() {
    slurm || return
    run "$patience" a srun -N 2 -n 2 "$toy" --backend mpi --steps 5
    fails && one_error && says "no MPI launcher started this process" || return
    run "$patience" a srun --mpi=pmi2 -N 2 -n 2 "$toy" --backend mpi --steps 5
    fails && says "OMPI was not built with SLURM's PMI support"
}
case_slurm_without_token() {
    slurm || return
    unset CANDLE_DIST_TOKEN
    toy_by_srun -N 2 -n 4 "$toy" --backend mpi --steps 5 --tp 4
    # Slurm lets the others go on when one ends, so each says it.
    fails && says "a job that spans hosts needs a token"
}
case_slurm_heterogeneous() {
    slurm && toy_by_srun -N 1 -n 1 "$toy" --backend mpi --steps 10 --tp 3 : -N 1 -n 2 "$toy" --backend mpi --steps 10 --tp 3 && agree
}
# Two steps of one job on the same hosts.
case_slurm_two_steps() {
    slurm || return
    cat >"$scratch/shared/job" <<END
#!/bin/bash
#SBATCH --nodes=2 --ntasks=4
export CANDLE_DIST_TOKEN=\$(openssl rand -hex 16)
for step in 1 2; do
    srun --mpi=pmix --exact -N 2 -n 2 --mem 0 $toy --backend mpi --steps 20 --tp 2 >$scratch/shared/step\$step 2>&1 &
done
wait
END
    run "$patience" a sbatch --wait --output "$scratch/shared/output" "$scratch/shared/job"
    cat "$scratch/shared/output"
    succeeds || return
    for out in "$scratch/shared/step1" "$scratch/shared/step2"; do
        cat "$out"
        agree || return
    done
}
# A host is lost; Slurm ends the step.
case_slurm_cut() {
    slurm || return
    start a srun --mpi=pmix -N 3 -n 3 "$toy" --backend mpi --runs tp --tp 3 --steps 1000000
    trains toy-transformer 3 || return
    cut_off c
    ends a b && blames 2
}

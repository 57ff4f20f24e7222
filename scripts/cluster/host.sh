#!/usr/bin/env bash
# The first process of a host: gives it its name, files and memory, and collects its orphans until the host ends.
set -euo pipefail
host=$1 shm=$2 own=/run/cluster/$1
hostname "$host"
mount -t proc proc /proc
mount -t tmpfs -o size=1g tmpfs /tmp
mount -t tmpfs -o "size=$shm" tmpfs /dev/shm
mount --bind "$own/hosts" /etc/hosts
mount --bind "$own/hostname" /etc/hostname
mount --bind /run/cluster/ssh/client /etc/ssh/ssh_config
touch "$own/ready"
trap : CHLD
while :; do
    sleep 3600 &
    wait $! || true
done

#!/usr/bin/env bash
# Runs one case of scripts/cluster.sh, inside its namespaces. The status is 0 if it passed, 77 if it cannot be tried here.
set -uo pipefail
cd "$(dirname "$0")/../.."
. scripts/cluster/hosts.sh
for chapter in openmpi faults folders names slurm mpich; do . "scripts/cluster/$chapter.sh"; done
"case_$1"

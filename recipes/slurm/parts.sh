# The parts of a job, each a step of Slurm on some of its nodes. The batch files source it.
# shellcheck shell=bash

set -euo pipefail
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${NODES[0]} PORT=$((20000 + SLURM_JOB_ID % 10000))
export ROLLTAP_ENGINE_KEY_FILE=$PWD/engine.key
[ -e engine.key ] || (umask 077 && head -c 32 /dev/urandom | base64 > engine.key)
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT # the other parts end with the last one

# on FIRST NUMBER TIMES COMMAND...: become a step that runs a command so many times on each of so many nodes. When one
# of them fails, all end.
on() {
    exec srun --relative="$1" --nodes="$2" --ntasks=$(($2 * $3)) --ntasks-per-node="$3" \
        --overlap --cpu-bind=none --kill-on-bad-exit=1 "${@:4}"
}

# await PROCESS COMMAND...: wait until a command succeeds, which it cannot once the part with this process has ended.
await() {
    until "${@:2}" &> /dev/null; do
        kill -0 "$1" 2> /dev/null || { echo "error: a part of the job has ended: its output says why" >&2 && exit 1; }
        sleep 5
    done
}

# start_engines FIRST NUMBER ARGUMENTS...: PER_NODE engines on each node, by `rolltap serve`. Sets ENGINES, their URLs.
start_engines() {
    # shellcheck disable=SC2016 # the node's own name, and the number of the engine on it
    on "$1" "$2" "$PER_NODE" bash -c '
        if ((PER_NODE > 1)); then export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID; fi
        exec rolltap serve --host "$SLURMD_NODENAME" --port $((8000 + SLURM_LOCALID)) "$@"' serve "${@:3}" &
    local node gpu url
    ENGINES=""
    for node in "${NODES[@]:$1:$2}"; do
        for ((gpu = 0; gpu < PER_NODE; gpu++)); do ENGINES+=",http://$node:$((8000 + gpu))"; done
    done
    ENGINES=${ENGINES:1}
    for url in ${ENGINES//,/ }; do await $! rolltap engine status "$url"; done
}

# start_fleet: Ray on all nodes, for the boxes of sessions. Sets FLEET, its address.
start_fleet() {
    export FLEET=$HEAD:6379
    # shellcheck disable=SC2016
    on 0 ${#NODES[@]} 1 bash -c '
        if [ "$SLURM_NODEID" = 0 ]; then first=(--head --port=6379); else first=(--address="$FLEET"); fi
        exec ray start "${first[@]}" --num-gpus=0 --disable-usage-stats --block' &
    await $! rolltap fleet status --ray "$FLEET"
}

# train NUMBER PROCESSES ARGUMENTS...: `rolltap train` on the first nodes, in so many processes on each.
train() {
    # shellcheck disable=SC2016
    (on 0 "$1" 1 bash -c 'exec torchrun --nnodes "$1" --node-rank "$SLURM_NODEID" --master-addr "$HEAD" \
        --master-port "$PORT" --nproc-per-node "$2" -m rolltap train "${@:3}"' train "$@")
}

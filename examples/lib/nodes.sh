# Sourced by examples that run on one node or more.
#
#   run_on_nodes GPUS_OF_A_NODE PROGRAM.py FLAGS...
#
# With NODES=4 RENDEZVOUS=host:29500, the same on each of four nodes, torchrun starts the ranks.
# Without NODES the program starts the ranks of this node itself.
run_on_nodes() {
    local gpus="$1" program="$2"
    shift 2
    if [[ "${NODES:-1}" == 1 ]]; then
        exec "$PYTHON" "$program" --nproc-per-node "$gpus" "$@"
    fi
    exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$gpus" \
        --max-restarts 0 --rdzv-backend c10d --rdzv-id megatron_ext \
        --rdzv-endpoint "${RENDEZVOUS:?NODES=$NODES needs RENDEZVOUS=host:port of one of them}" \
        "$program" "$@"
}

/*
 * Measures Open MPI in the same way as bench-collectives, and prints the same JSON object.
 *
 *   mpicc -O3 -o openmpi openmpi.c && mpirun --oversubscribe -n 2 ./openmpi
 *
 * Every rank times its own call after a barrier. A row is the median over the rounds of the slowest rank's time.
 * send_recv is half a ping-pong of ranks 0 and 1. Results go to buffers that have been used before.
 * Arguments, if any, are sizes in bytes of each rank's input.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARM_UP = 5, MIN_ROUNDS = 7, MAX_ROUNDS = 2001 };
static const double BUDGET_US = 1e6;

enum op { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND_RECV, OPS };
static const char *const NAMES[OPS] = {"all_reduce", "all_gather", "reduce_scatter",
                                       "all_to_all", "broadcast",  "send_recv"};

static int rank, world;

/* Returns element i of a rank's input. Sums over ranks are exact in f32. */
static float element(int of, size_t i) { return (float)((i % 251 + 1) * (size_t)(of + 1)); }

static float sum(size_t i) { return (float)((i % 251 + 1) * (size_t)(world * (world + 1) / 2)); }

/* Runs the op on len elements per rank. A broadcast is in place: its root sends `in`, the others receive in `out`. */
static void call(enum op op, float *in, float *out, int len) {
    const int piece = len / world;
    switch (op) {
    case ALL_REDUCE: MPI_Allreduce(in, out, len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case ALL_GATHER: MPI_Allgather(in, len, MPI_FLOAT, out, len, MPI_FLOAT, MPI_COMM_WORLD); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(in, out, piece, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case ALL_TO_ALL: MPI_Alltoall(in, piece, MPI_FLOAT, out, piece, MPI_FLOAT, MPI_COMM_WORLD); break;
    case BROADCAST: MPI_Bcast(rank == 0 ? in : out, len, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
    case SEND_RECV:
        if (rank == 0) {
            MPI_Send(in, len, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(out, len, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else if (rank == 1) {
            MPI_Recv(out, len, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(in, len, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
        }
        break;
    default: break;
    }
}

static float expected(enum op op, size_t i, size_t len) {
    const size_t piece = len / (size_t)world, start = piece * (size_t)rank;
    switch (op) {
    case ALL_REDUCE: return sum(i);
    case ALL_GATHER: return element((int)(i / len), i % len);
    case REDUCE_SCATTER: return sum(start + i);
    case ALL_TO_ALL: return element((int)(i / piece), start + i % piece);
    case BROADCAST: return element(0, i);
    default: return element(1 - rank, i);
    }
}

static void check(enum op op, const float *out, size_t len) {
    size_t count = op == ALL_GATHER ? len * (size_t)world : op == REDUCE_SCATTER ? len / (size_t)world : len;
    if ((op == BROADCAST && rank == 0) || (op == SEND_RECV && rank > 1)) count = 0;
    for (size_t i = 0; i < count; i++) {
        if (out[i] != expected(op, i, len)) {
            fprintf(stderr, "rank %d: %s gave %g instead of %g at element %zu\n", rank, NAMES[op], out[i],
                    expected(op, i, len), i);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int count) {
    qsort(times, (size_t)count, sizeof(double), ascending);
    return times[count / 2];
}

/* Returns the microseconds of one call on this rank, after a barrier. */
static double timed(enum op op, float *in, float *out, size_t len) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    call(op, in, out, (int)len);
    return (MPI_Wtime() - start) * 1e6;
}

/* Returns the median microseconds of one row, on rank 0. */
static double row(enum op op, float *in, float *out, size_t len, int *rounds) {
    static double mine[MAX_ROUNDS], slowest[MAX_ROUNDS];
    memset(out, 0, len * sizeof(float) * (size_t)world);
    call(op, in, out, (int)len);
    check(op, out, len);
    for (int i = 0; i < WARM_UP; i++) mine[i] = timed(op, in, out, len);
    const double fit = BUDGET_US / median(mine, WARM_UP);
    *rounds = fit < MIN_ROUNDS ? MIN_ROUNDS : fit > MAX_ROUNDS ? MAX_ROUNDS : (int)fit;
    MPI_Bcast(rounds, 1, MPI_INT, 0, MPI_COMM_WORLD);
    for (int i = 0; i < *rounds; i++) mine[i] = timed(op, in, out, len);
    MPI_Reduce(mine, slowest, *rounds, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    return median(slowest, *rounds) * (op == SEND_RECV ? 0.5 : 1.0);
}

int main(int argc, char **argv) {
    static const size_t DEFAULT[] = {4 << 10, 256 << 10, 4 << 20, 64 << 20};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    const int sizes = argc > 1 ? argc - 1 : (int)(sizeof DEFAULT / sizeof *DEFAULT);
    const char *separator = "";
    if (rank == 0) printf("{\"world\":%d,\"rows\":[", world);
    for (enum op op = 0; op < OPS; op++) {
        if (op == SEND_RECV && world < 2) continue;
        for (int s = 0; s < sizes; s++) {
            const size_t bytes = argc > 1 ? strtoull(argv[s + 1], NULL, 10) : DEFAULT[s];
            const size_t len = bytes / sizeof(float);
            float *in = malloc(bytes), *out = malloc(bytes * (size_t)world);
            if (len == 0 || len % (size_t)world != 0 || !in || !out) {
                fprintf(stderr, "no room for %zu bytes, or no whole number of f32 for each of %d ranks\n", bytes, world);
                MPI_Abort(MPI_COMM_WORLD, 2);
            }
            for (size_t i = 0; i < len; i++) in[i] = element(rank, i);
            int rounds;
            const double us = row(op, in, out, len, &rounds);
            if (rank == 0)
                printf("%s{\"op\":\"%s\",\"bytes\":%zu,\"median_us\":%.3f,\"rounds\":%d}", separator, NAMES[op], bytes,
                       us, rounds);
            separator = ",";
            free(in);
            free(out);
        }
    }
    if (rank == 0) printf("]}\n");
    MPI_Finalize();
    return 0;
}

// How long random rows of a table take to read, as the table grows: two threads, each with half of the table, as the two
// ranks of a row-wise sharded embedding. Prints the microseconds per 4,096 rows for each distance of prefetching.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { IDS = 4096, WIDTH = 64, ROUNDS = 400 };
static int compare(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec / 1e3; }
struct job { size_t rows; int ahead; double us; uint64_t seed; };

static void *work(void *argument) {
    struct job *job = argument;
    float *table = malloc(job->rows * WIDTH * sizeof(float)), *out = malloc(IDS * WIDTH * sizeof(float));
    for (size_t i = 0; i < job->rows * WIDTH; i++) table[i] = i;
    uint32_t ids[IDS];
    double times[ROUNDS];
    uint64_t x = job->seed;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < IDS; i++) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; ids[i] = x % job->rows; }
        double began = now();
        for (int i = 0; i < IDS; i++) {
            if (job->ahead && i + job->ahead < IDS)
                for (int line = 0; line < WIDTH; line += 16) __builtin_prefetch(table + (size_t)ids[i + job->ahead] * WIDTH + line);
            memcpy(out + i * WIDTH, table + (size_t)ids[i] * WIDTH, WIDTH * sizeof(float));
        }
        times[round] = now() - began;
        if (out[x % (IDS * WIDTH)] < 0) puts("");
    }
    qsort(times, ROUNDS, sizeof *times, compare);
    job->us = times[ROUNDS / 2];
    free(table);
    free(out);
    return NULL;
}

int main(void) {
    size_t vocabs[] = {10000, 100000, 1000000};
    int aheads[] = {0, 4, 16, 32};
    for (int v = 0; v < 3; v++)
        for (int a = 0; a < 4; a++) {
            struct job jobs[2] = {{vocabs[v] / 2, aheads[a], 0, 88172645463325252u}, {vocabs[v] / 2, aheads[a], 0, 1234567891011u}};
            pthread_t threads[2];
            for (int t = 0; t < 2; t++) pthread_create(&threads[t], NULL, work, &jobs[t]);
            for (int t = 0; t < 2; t++) pthread_join(threads[t], NULL);
            printf("%zu rows, %d ahead: %.0f us\n", vocabs[v], aheads[a], jobs[0].us > jobs[1].us ? jobs[0].us : jobs[1].us);
        }
}

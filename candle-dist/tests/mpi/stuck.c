/*
 * Stands before MPI, as LD_PRELOAD, where the variable STUCK says so:
 * "begin": the start of MPI on the last rank never ends, as if no connection were possible. "started", "connected" and "sharing": it
 * does not come back from the start, the first exchange, and the allocation of shared memory. "end": the end of MPI never ends.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number(const char *one, const char *other) {
    const char *text = getenv(one);
    if (!text) text = getenv(other);
    return text ? atoi(text) : -1;
}

static void stay(const char *where) {
    const char *stuck = getenv("STUCK");
    if (stuck && !strcmp(stuck, where)) for (;;) pause();
}

static int is_last(void) {
    return number("OMPI_COMM_WORLD_RANK", "PMI_RANK") == number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") - 1;
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    if (is_last()) stay("begin");
    int (*begin)(int *, char ***, int, int *) = dlsym(RTLD_NEXT, "MPI_Init_thread");
    int code = begin(argc, argv, required, provided);
    if (is_last()) stay("started");
    return code;
}

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm *made) {
    int (*duplicate)(MPI_Comm, MPI_Comm *) = dlsym(RTLD_NEXT, "MPI_Comm_dup");
    int code = duplicate(comm, made);
    if (is_last()) stay("connected");
    return code;
}

/* The last call of a start that shares memory. */
int MPI_Win_sync(MPI_Win window) {
    int (*sync)(MPI_Win) = dlsym(RTLD_NEXT, "MPI_Win_sync");
    static int calls;
    int code = sync(window);
    if (is_last() && ++calls == 2) stay("sharing");
    return code;
}

int MPI_Finalize(void) {
    int (*end)(void) = dlsym(RTLD_NEXT, "MPI_Finalize");
    int code = end();
    stay("end");
    return code;
}

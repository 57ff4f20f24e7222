/*
 * Stands before MPI, as LD_PRELOAD, where the variable STUCK says so:
 * "begin": the start of MPI on the last rank never ends, as if no connection were possible. "end": the end of MPI never ends.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
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

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    int last = number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") - 1;
    if (number("OMPI_COMM_WORLD_RANK", "PMI_RANK") == last) stay("begin");
    int (*begin)(int *, char ***, int, int *) = dlsym(RTLD_NEXT, "MPI_Init_thread");
    return begin(argc, argv, required, provided);
}

int MPI_Finalize(void) {
    int (*end)(void) = dlsym(RTLD_NEXT, "MPI_Finalize");
    int code = end();
    stay("end");
    return code;
}

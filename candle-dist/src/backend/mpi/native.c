/*
 * What the driver needs of MPI, as functions whose types are the same for every MPI.
 *
 * MPI fixes neither the types of its handles nor the values of its constants: Open MPI has pointers, MPICH has ints. Here
 * a handle is an integer that holds either. Each function returns MPI's error code, 0 for success.
 */
#include <mpi.h>
#include <stdint.h>
#include <string.h>

#define COMM(handle) ((MPI_Comm)(handle))

int candle_mpi_state(int *started, int *ended) {
    int code = MPI_Initialized(started);
    return code != MPI_SUCCESS ? code : MPI_Finalized(ended);
}

/* Levels are counted from 0 (single) to 3 (multiple). */
static int level_of(int provided) {
    return provided == MPI_THREAD_MULTIPLE     ? 3
           : provided == MPI_THREAD_SERIALIZED ? 2
           : provided == MPI_THREAD_FUNNELED   ? 1
                                               : 0;
}

int candle_mpi_start(int *level) {
    int provided = MPI_THREAD_SINGLE;
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    *level = level_of(provided);
    return code;
}

int candle_mpi_level(int *level) {
    int provided = MPI_THREAD_SINGLE;
    int code = MPI_Query_thread(&provided);
    *level = level_of(provided);
    return code;
}

int candle_mpi_end(void) { return MPI_Finalize(); }

uintptr_t candle_mpi_world(void) { return (uintptr_t)MPI_COMM_WORLD; }

uintptr_t candle_mpi_read(const void *comm) {
    MPI_Comm handle;
    memcpy(&handle, comm, sizeof handle);
    return (uintptr_t)handle;
}

int candle_mpi_place(uintptr_t comm, int *rank, int *size) {
    int code = MPI_Comm_rank(COMM(comm), rank);
    return code != MPI_SUCCESS ? code : MPI_Comm_size(COMM(comm), size);
}

/* A communicator of the same ranks whose errors are return codes, and its largest tag. */
int candle_mpi_duplicate(uintptr_t comm, uintptr_t *copy, int *most_tag) {
    MPI_Comm made;
    int code = MPI_Comm_dup(COMM(comm), &made);
    if (code != MPI_SUCCESS) return code;
    code = MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    if (code != MPI_SUCCESS) return code;
    int *limit = NULL, found = 0;
    code = MPI_Comm_get_attr(made, MPI_TAG_UB, &limit, &found);
    *most_tag = found ? *limit : 32767;
    *copy = (uintptr_t)made;
    return code;
}

int candle_mpi_free(uintptr_t comm) {
    MPI_Comm handle = COMM(comm);
    return MPI_Comm_free(&handle);
}

int candle_mpi_send(uintptr_t comm, const void *data, int len, int to, int tag, uintptr_t *request) {
    MPI_Request made;
    int code = MPI_Isend(data, len, MPI_BYTE, to, tag, COMM(comm), &made);
    *request = (uintptr_t)made;
    return code;
}

/* From anybody if `from` is negative. */
int candle_mpi_receive(uintptr_t comm, void *data, int len, int from, int tag, uintptr_t *request) {
    MPI_Request made;
    int code = MPI_Irecv(data, len, MPI_BYTE, from < 0 ? MPI_ANY_SOURCE : from, tag, COMM(comm), &made);
    *request = (uintptr_t)made;
    return code;
}

/* Lets MPI go on; the sender and the bytes are of a receive that is done. */
int candle_mpi_test(uintptr_t *request, int *done, int *from, int *len) {
    MPI_Request handle = (MPI_Request)*request;
    MPI_Status status;
    int code = MPI_Test(&handle, done, &status);
    *request = (uintptr_t)handle;
    if (code != MPI_SUCCESS || !*done) return code;
    *from = status.MPI_SOURCE;
    return MPI_Get_count(&status, MPI_BYTE, len);
}

/* Ends a receive for which nothing has come. */
int candle_mpi_cancel(uintptr_t *request) {
    MPI_Request handle = (MPI_Request)*request;
    int code = MPI_Cancel(&handle);
    if (code == MPI_SUCCESS) code = MPI_Wait(&handle, MPI_STATUS_IGNORE);
    *request = (uintptr_t)handle;
    return code;
}

/* The words for an error code, at most `room` bytes with the final zero. */
void candle_mpi_error(int code, char *text, int room) {
    char words[MPI_MAX_ERROR_STRING + 1] = "";
    int len = 0;
    if (MPI_Error_string(code, words, &len) != MPI_SUCCESS) strcpy(words, "unknown error");
    strncpy(text, words, (size_t)room - 1);
    text[room - 1] = 0;
}

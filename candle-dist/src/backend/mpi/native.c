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

/*
 * Keeps Open MPI from shared memory, where each rank would take a segment: "vader" in version 4, "sm" in version 5. What a user
 * excludes stays excluded, and who lists what to use, or excludes TCP, keeps that. Other MPIs have no such variable. Returns whether it
 * was written.
 */
int candle_mpi_avoid_shared_memory(void) {
    int level, index, room, is_written = 0;
    MPI_T_cvar_handle variable;
    if (MPI_T_init_thread(MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) return 0;
    /* The interface stays open: a variable that is written counts for as long as it does. */
    if (MPI_T_cvar_get_index("btl", &index) != MPI_SUCCESS) return 0;
    if (MPI_T_cvar_handle_alloc(index, NULL, &variable, &room) != MPI_SUCCESS) return 0;
    char now[4096] = "", then[sizeof now + 16] = "^vader,sm";
    int is_read = room <= (int)sizeof now && MPI_T_cvar_read(variable, now) == MPI_SUCCESS;
    if (is_read && (!now[0] || (now[0] == '^' && !strstr(now, "tcp")))) {
        if (now[0]) strcat(strcat(then, ","), now + 1);
        is_written = strlen(then) < (size_t)room && MPI_T_cvar_write(variable, then) == MPI_SUCCESS;
    }
    MPI_T_cvar_handle_free(&variable);
    return is_written;
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

/*
 * Memory that up to `most` ranks of a host share, `ring` bytes in each segment for each of them. The first `counts` of
 * these bytes are zeroed. `window` stays null if there are no two such ranks. There is room: MPI_Win_allocate_shared leaves the
 * others waiting when it fails on one rank. `rank` and `size` are those of the part of the host that shares.
 */
int candle_mpi_share(uintptr_t comm, int most, size_t ring, size_t counts, uintptr_t *window, uintptr_t *group, int *rank, int *size) {
    MPI_Comm host, part;
    int code = MPI_Comm_split_type(COMM(comm), MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    if (code != MPI_SUCCESS) return code;
    code = MPI_Comm_rank(host, rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_split(host, *rank / most, *rank, &part);
    MPI_Comm_free(&host);
    if (code != MPI_SUCCESS) return code;
    MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN);
    *group = (uintptr_t)part;
    code = MPI_Comm_size(part, size);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(part, rank);
    if (code != MPI_SUCCESS || *size < 2) return code;
    MPI_Win made;
    void *mine = NULL;
    MPI_Aint bytes = (MPI_Aint)ring * *size;
    int here = MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, part, &mine, &made) == MPI_SUCCESS;
    int all = 0;
    code = MPI_Allreduce(&here, &all, 1, MPI_INT, MPI_MIN, part);
    if (code != MPI_SUCCESS || !all) return code;
    /* Only the counts of each ring: the rest is written before it is read, and costs no memory until then. */
    for (int i = 0; i < *size; i++) memset((char *)mine + (size_t)i * ring, 0, counts);
    code = MPI_Win_lock_all(MPI_MODE_NOCHECK, made);
    if (code == MPI_SUCCESS) code = MPI_Win_sync(made);
    if (code == MPI_SUCCESS) code = MPI_Barrier(part);
    if (code == MPI_SUCCESS) code = MPI_Win_sync(made);
    *window = (uintptr_t)made;
    return code;
}

/* The address of a segment in this process. */
int candle_mpi_segment(uintptr_t window, int rank, void **data) {
    MPI_Aint bytes;
    int unit;
    return MPI_Win_shared_query((MPI_Win)window, rank, &bytes, &unit, data);
}

/* The rank in `comm` of a rank of `group`. */
int candle_mpi_rank_of(uintptr_t comm, uintptr_t group, int rank, int *found) {
    MPI_Group from, to;
    int code = MPI_Comm_group(COMM(group), &from);
    if (code != MPI_SUCCESS) return code;
    code = MPI_Comm_group(COMM(comm), &to);
    if (code == MPI_SUCCESS) {
        code = MPI_Group_translate_ranks(from, 1, &rank, to, found);
        MPI_Group_free(&to);
    }
    MPI_Group_free(&from);
    return code;
}

/* Frees a window and its group; all ranks of the group wait for each other. */
int candle_mpi_unshare(uintptr_t window, uintptr_t group) {
    MPI_Win made = (MPI_Win)window;
    int code = MPI_Win_unlock_all(made);
    if (code == MPI_SUCCESS) code = MPI_Win_free(&made);
    return code == MPI_SUCCESS ? candle_mpi_free(group) : code;
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

/* A barrier that is done when all ranks have started it. */
int candle_mpi_barrier(uintptr_t comm, uintptr_t *request) {
    MPI_Request made;
    int code = MPI_Ibarrier(COMM(comm), &made);
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

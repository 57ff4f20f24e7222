/*
 * What the tests need of MPI before candle-dist uses it, as functions whose types are the same for every MPI.
 *
 * An error ends the job: MPI_COMM_WORLD has MPI's default handler.
 */
#include <mpi.h>
#include <stddef.h>

/* Returns whether this MPI may be called from several threads. */
int test_utils_mpi_start(int *rank, int *size) {
    int provided = MPI_THREAD_SINGLE;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    return provided == MPI_THREAD_MULTIPLE;
}

/* Gives all ranks the bytes of rank 0. */
void test_utils_mpi_from_first(void *data, int len) { MPI_Bcast(data, len, MPI_BYTE, 0, MPI_COMM_WORLD); }

/* Writes a communicator of the first ranks to `made`, and MPI_COMM_NULL on the others. */
void test_utils_mpi_of_first(int count, MPI_Comm *made) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank < count ? 0 : MPI_UNDEFINED, rank, made);
}

void test_utils_mpi_end(void) { MPI_Finalize(); }

/* Ends all processes of the job. */
void test_utils_mpi_abort(void) { MPI_Abort(MPI_COMM_WORLD, 1); }

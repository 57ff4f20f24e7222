//! The processes of a job: their MPI, and the folder that they share.
use super::meet;
use candle_dist::backend::mpi::Comm;
use candle_dist::threads;
use std::ffi::{c_int, c_void};
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

unsafe extern "C" {
    fn test_utils_mpi_start(rank: *mut c_int, size: *mut c_int) -> c_int;
    fn test_utils_mpi_from_first(data: *mut c_void, len: c_int);
    fn test_utils_mpi_of_first(count: c_int, made: *mut c_void);
    fn test_utils_mpi_end();
    fn test_utils_mpi_abort();
    fn atexit(f: extern "C" fn()) -> c_int;
}

/// How long a process that has run all its tests waits for the others.
const LAST_WAIT: Duration = Duration::from_secs(120);

/// This process among those that mpirun started.
pub(super) struct Job {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// A folder of all processes, with the files by which they meet.
    pub(super) folder: PathBuf,
    /// MPI's handles of the first 1, 2, .. processes.
    firsts: Vec<usize>,
    /// Set if some process did not end a world in time: it may hold MPI, and meets no one again.
    pub(super) is_broken: AtomicBool,
    over_mpi: AtomicUsize,
    among_threads: AtomicUsize,
}

/// Returns the job; the first call starts MPI, on all processes.
///
/// # Panics
/// If mpirun did not start this process, or its MPI cannot be called from several threads.
pub(super) fn job() -> &'static Job {
    static JOB: OnceLock<Job> = OnceLock::new();
    JOB.get_or_init(|| {
        let job = Job::start();
        // SAFETY: the function is of C's kind and does not unwind.
        assert_eq!(unsafe { atexit(end) }, 0, "MPI must be ended with the program");
        job
    })
}

impl Job {
    fn start() -> Self {
        // SAFETY: tests run one at a time, and the thread of the test program only waits for them. The processes
        // share the cores, so one thread for each is enough.
        unsafe { threads::settle_among_threads(1) };
        let (mut rank, mut size) = (0, 0);
        // SAFETY: both outlive the call, and nothing else in a program of tests starts MPI.
        let is_multiple = unsafe { test_utils_mpi_start(&mut rank, &mut size) } != 0;
        assert!(is_multiple, "the tests need an MPI with MPI_THREAD_MULTIPLE");
        let (rank, size) = (rank as usize, size as usize);
        let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos());
        let name = format!("candle-mpi-{}-{nanos}", std::process::id());
        let mut folder = [b' '; 512];
        if rank == 0 {
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let path = path.to_string_lossy().into_owned();
            folder[..path.len()].copy_from_slice(path.as_bytes());
        }
        // SAFETY: the buffer has this length on all processes.
        unsafe { test_utils_mpi_from_first(folder.as_mut_ptr().cast(), folder.len() as c_int) };
        let first = |count: usize| {
            let mut handle = 0;
            // SAFETY: a handle of any MPI fits and is aligned.
            unsafe {
                test_utils_mpi_of_first(count as c_int, std::ptr::from_mut::<usize>(&mut handle).cast());
            };
            handle
        };
        Self {
            rank,
            size,
            folder: PathBuf::from(String::from_utf8_lossy(&folder).trim_end()),
            firsts: (1..=size).map(first).collect(),
            is_broken: AtomicBool::new(false),
            over_mpi: AtomicUsize::new(0),
            among_threads: AtomicUsize::new(0),
        }
    }

    /// Returns the communicator of the first `count` processes. This process must be one of them.
    pub(super) fn of_first(&self, count: usize) -> Comm {
        let handle: *const usize = &self.firsts[count - 1];
        // SAFETY: MPI wrote its handle there, and the communicator is never freed.
        unsafe { Comm::from_raw(handle.cast()) }
    }

    /// Counts a world.
    pub(super) fn count(&self, is_over_mpi: bool) {
        let counter = if is_over_mpi { &self.over_mpi } else { &self.among_threads };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the same folder for the n-th call of a test on all processes. The folder goes with the job.
///
/// # Panics
/// If the folder cannot be created.
pub(crate) fn shared_folder(name: &str) -> PathBuf {
    let folder = job().folder.join(format!("{}-{name}", meet::next_folder()));
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// Ends MPI when the program ends: mpirun takes a process that does not do so for a crash.
extern "C" fn end() {
    let job = job();
    let all_here = meet::wait_for_the_end(job, LAST_WAIT);
    if job.rank == 0 {
        let (over_mpi, threads) = (&job.over_mpi, &job.among_threads);
        // If the terminal is gone, the tests have still run.
        let _ = writeln!(
            std::io::stderr(),
            "\nworlds of processes {}, of threads {}",
            over_mpi.load(Ordering::Relaxed),
            threads.load(Ordering::Relaxed)
        );
    }
    if !all_here || job.is_broken.load(Ordering::Relaxed) {
        let _ = writeln!(std::io::stderr(), "rank {}: a process hangs, so all are ended", job.rank);
        // SAFETY: MPI was started, and nothing follows.
        unsafe { test_utils_mpi_abort() };
    }
    // SAFETY: MPI was started, and no thread of this process uses it anymore.
    unsafe { test_utils_mpi_end() };
    if job.rank == 0 {
        // If it cannot be removed, the system cleans it up.
        fs::remove_dir_all(&job.folder).ok();
    }
}

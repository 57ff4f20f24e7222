//! Options for worlds of processes.
use super::Secret;
use std::time::Duration;

/// Options for how the processes of a world find and monitor each other.
///
/// ```
/// use candle_dist::init::InitOptions;
/// use std::time::Duration;
///
/// // From the launcher's variables:
/// let options = InitOptions::new().timeout(Duration::from_secs(60)).debug(true);
/// // Without a launcher, here process 1 of 2, whose token the program has sent to both:
/// let token = "0e8b1f6f6c5a4d0f9d4c2b7a1e3f5a6b";
/// let options = InitOptions::explicit("127.0.0.1:29500", 1, 2).token(token);
/// ```
#[derive(Debug, Clone)]
pub struct InitOptions {
    pub(crate) explicit: Option<(String, usize, usize)>,
    pub(crate) local: Option<(usize, usize)>,
    pub(crate) token: Option<Secret>,
    pub(crate) no_token: bool,
    pub(crate) timeout: Duration,
    pub(crate) init_timeout: Duration,
    pub(crate) lost_after: Duration,
    pub(crate) arguments: Option<Vec<String>>,
    pub(crate) debug: Option<bool>,
    pub(crate) threads_per_rank: Option<usize>,
    pub(crate) gpu: GpuOptions,
}

/// What a rank may set for its GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuOptions {
    /// The most thread blocks of a collective's kernel.
    pub(crate) max_ctas: Option<u32>,
    /// How long NCCL may take to abort a communicator before the process ends.
    pub(crate) abort_timeout: Duration,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self { max_ctas: None, abort_timeout: Duration::from_secs(60) }
    }
}

impl Default for InitOptions {
    fn default() -> Self {
        Self {
            explicit: None,
            local: None,
            token: None,
            no_token: false,
            timeout: Duration::from_secs(600),
            init_timeout: Duration::from_secs(60),
            lost_after: Duration::from_secs(10),
            arguments: None,
            debug: None,
            threads_per_rank: None,
            gpu: GpuOptions::default(),
        }
    }
}

impl InitOptions {
    /// Creates options that read rank, size and address from the launcher's variables; see
    /// [`LaunchInfo`](super::LaunchInfo).
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates options for rank `rank` of `size`, where rank 0 listens at `address` (`host:port`).
    ///
    /// Unless the address is a loopback address, [`local`](Self::local) is required too. A world of more than one process
    /// needs a [`token`](Self::token), which keeps out processes of other jobs at the same address.
    pub fn explicit(address: &str, rank: usize, size: usize) -> Self {
        Self { explicit: Some((address.to_string(), rank, size)), ..Self::default() }
    }

    /// With [`explicit`](Self::explicit): sets this process's rank among the `size` processes of its host.
    pub fn local(mut self, rank: usize, size: usize) -> Self {
        self.local = Some((rank, size));
        self
    }

    /// Sets the token that all processes of the job share and others do not know: at least 22 random characters.
    ///
    /// The processes prove to each other that they know it, and do not send it. By default it is `CANDLE_DIST_TOKEN`; see
    /// [`LaunchInfo`](super::LaunchInfo) for jobs without one.
    pub fn token(mut self, token: &str) -> Self {
        self.token = Some(Secret::Token(token.to_string()));
        self
    }

    /// Allows a job that has no secret to start without a token; by default only if `CANDLE_DIST_NO_TOKEN=1`.
    ///
    /// A process that connects to rank 0's port as a free rank then takes that rank's place. On one host, it must be of
    /// the same user.
    pub fn no_token(mut self) -> Self {
        self.no_token = true;
        self
    }

    /// Sets how long a rank may wait in one call before the world fails; ten minutes by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets how long to wait until all processes have joined; one minute by default.
    ///
    /// Then the backends start. Each time that a rank waits for other ranks there, it waits for at most this time, or the
    /// [`timeout`](Self::timeout) if that is longer. When all are there, MPI has this time to
    /// connect them. NCCL connects the GPUs of a group in the first call, which has the `timeout`.
    ///
    /// MPI has this time to end, too. A rank whose MPI takes longer ends without it, with a note: all results are out by then.
    pub fn init_timeout(mut self, timeout: Duration) -> Self {
        self.init_timeout = timeout;
        self
    }

    /// Sets after how long without a heartbeat a process counts as lost; ten seconds by default.
    ///
    /// Processes send at least five heartbeats in that time, even while they compute. A process that ends or crashes is
    /// noticed at once; this time is for hosts that freeze and networks that fail. Time in which a process itself gets no
    /// processor does not count. The setting of rank 0 applies to all ranks.
    pub fn lost_after(mut self, silence: Duration) -> Self {
        self.lost_after = silence;
        self
    }

    /// Turns [`Switch::Debug`](crate::switch::Switch::Debug) on or off; by default it is on if `CANDLE_DIST_DEBUG=1`.
    ///
    /// The calls of all ranks, and the operands of layers above, are compared before data moves. Each call then costs a round trip to
    /// rank 0. The setting of rank 0 applies to all ranks.
    pub fn debug(mut self, debug: bool) -> Self {
        self.debug = Some(debug);
        self
    }

    /// Sets the most thread blocks (CTAs) of NCCL's kernels; see [`World::max_ctas`](crate::World::max_ctas). The setting of a group's first
    /// member applies to all of them.
    pub fn max_ctas(mut self, most: u32) -> Self {
        self.gpu.max_ctas = Some(most);
        self
    }

    /// Sets how long NCCL may take to abort the calls of a GPU before the process ends; see
    /// [`World::abort_timeout`](crate::World::abort_timeout).
    pub fn abort_timeout(mut self, timeout: Duration) -> Self {
        self.gpu.abort_timeout = timeout;
        self
    }

    /// Sets what all ranks must agree on at the start; by default the arguments of this process, and with
    /// [`explicit`](Self::explicit) nothing. Ranks send each other digests of them.
    ///
    /// Ranks with unlike arguments (`mpirun -n 1 program --seed 1 : -n 1 program --seed 2`) would compute unlike things.
    /// A program that takes some for each rank passes the others here. `CANDLE_DIST_UNLIKE_ARGUMENTS=1` on rank 0 allows
    /// all to be unlike.
    ///
    /// ```
    /// use candle_dist::init::InitOptions;
    ///
    /// // Each rank may have its own file for logs.
    /// let mut shared: Vec<String> = std::env::args().skip(1).collect();
    /// shared.retain(|argument| !argument.starts_with("--log="));
    /// let options = InitOptions::new().arguments(&shared);
    /// ```
    pub fn arguments(mut self, arguments: &[impl AsRef<str>]) -> Self {
        self.arguments = Some(arguments.iter().map(|argument| argument.as_ref().to_string()).collect());
        self
    }

    /// Sets the number of compute threads per rank; by default the cores divided by the ranks of the host.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads);
        self
    }
}

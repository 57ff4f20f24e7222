//! How a world of processes is started and watched.
use std::time::Duration;

/// How the processes of a world find each other and watch over each other.
///
/// ```
/// use candle_dist::init::InitOptions;
/// use std::time::Duration;
///
/// // From the launcher's variables:
/// let options = InitOptions::new().timeout(Duration::from_secs(60)).debug(true);
/// // Without a launcher, here process 1 of 2:
/// let options = InitOptions::explicit("127.0.0.1:29500", 1, 2);
/// ```
#[derive(Debug, Clone)]
pub struct InitOptions {
    pub(crate) explicit: Option<(String, usize, usize)>,
    pub(crate) local: Option<(usize, usize)>,
    pub(crate) token: Option<String>,
    pub(crate) no_token: bool,
    pub(crate) timeout: Duration,
    pub(crate) init_timeout: Duration,
    pub(crate) lost_after: Duration,
    pub(crate) debug: Option<bool>,
    pub(crate) threads_per_rank: Option<usize>,
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
            debug: None,
            threads_per_rank: None,
        }
    }
}

impl InitOptions {
    /// Rank, size and address come from the launcher's variables; see [`LaunchInfo`](super::LaunchInfo).
    pub fn new() -> Self {
        Self::default()
    }

    /// This process is `rank` of `size`, and rank 0 listens at `address` (`host:port`).
    ///
    /// If the address is not this host's own, [`local`](Self::local) must be given too.
    pub fn explicit(address: &str, rank: usize, size: usize) -> Self {
        Self { explicit: Some((address.to_string(), rank, size)), ..Self::default() }
    }

    /// With [`explicit`](Self::explicit): this process is `rank` of the `size` that are on its host.
    pub fn local(mut self, rank: usize, size: usize) -> Self {
        self.local = Some((rank, size));
        self
    }

    /// What all processes of the job know; otherwise `CANDLE_DIST_TOKEN`, or the launcher's job id.
    ///
    /// It keeps the jobs of a cluster apart. It goes over the network as it is: it is no encryption.
    pub fn token(mut self, token: &str) -> Self {
        self.token = Some(token.to_string());
        self
    }

    /// Lets a job that spans hosts start without a token; by default only if `CANDLE_DIST_NO_TOKEN=1`.
    ///
    /// A process of another job that comes to rank 0's port with a free rank then takes that rank's place.
    pub fn no_token(mut self) -> Self {
        self.no_token = true;
        self
    }

    /// How long a rank may wait in one call before the world counts as failed; ten minutes by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long to wait until all processes are there; one minute by default.
    pub fn init_timeout(mut self, timeout: Duration) -> Self {
        self.init_timeout = timeout;
        self
    }

    /// After how long without a sign of life a process counts as lost; ten seconds by default.
    ///
    /// Processes give one at least five times in that time, whatever they compute. One that ends or crashes is noticed
    /// at once, without this, which is for hosts that freeze and networks that are cut. Give all ranks the same.
    pub fn lost_after(mut self, silence: Duration) -> Self {
        self.lost_after = silence;
        self
    }

    /// Compares the calls of all ranks before they move data; by default only if `CANDLE_DIST_DEBUG=1`.
    ///
    /// A call then costs a message to rank 0 and back. What rank 0 says holds for all ranks.
    pub fn debug(mut self, debug: bool) -> Self {
        self.debug = Some(debug);
        self
    }

    /// How many threads a rank computes with; by default the cores divided by the ranks of the host.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads);
        self
    }

    /// Whether calls are compared.
    pub(crate) fn is_debug(&self) -> bool {
        self.debug.unwrap_or_else(|| std::env::var("CANDLE_DIST_DEBUG").is_ok_and(|value| value.trim() == "1"))
    }
}

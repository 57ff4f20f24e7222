//! The environment variables of each launcher, one row per launcher.

/// The environment variables of one launcher.
pub(super) struct Launcher {
    pub(super) name: &'static str,
    /// A variable that distinguishes this launcher from others that also set `rank`.
    pub(super) mark: &'static str,
    pub(super) rank: &'static str,
    pub(super) size: &'static str,
    pub(super) local_rank: &'static str,
    /// The first of these that is set counts.
    pub(super) local_size: &'static [&'static str],
    /// The number of this node, if `local_size` lists all nodes.
    pub(super) node: Option<&'static str>,
    /// The list of hosts, in rank order.
    pub(super) hosts: Option<&'static str>,
    /// A variable, and the start of its value if the list of hosts is not in rank order.
    pub(super) unordered: Option<(&'static str, &'static str)>,
    /// Variables that identify the job; their values are joined.
    pub(super) job: &'static [&'static str],
    /// Variables that together name one launch, in all its processes and in no others of this host. Empty if there are none.
    pub(super) launch: &'static [&'static str],
    /// A variable with random bits that only the processes of the job get.
    pub(super) key: Option<&'static str>,
    /// Whether other launchers may run inside this one. Their variables then take precedence.
    pub(super) outer: bool,
}

/// The launchers, in the order in which they are checked.
pub(super) const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        mark: "RANK",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: &["LOCAL_WORLD_SIZE"],
        node: None,
        hosts: None,
        unordered: None,
        job: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
        // The run id is chosen by users, and "none" by default.
        launch: &[],
        key: None,
        outer: false,
    },
    Launcher {
        name: "Open MPI",
        mark: "OMPI_COMM_WORLD_RANK",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        node: None,
        hosts: None,
        unordered: None,
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        launch: &["PMIX_NAMESPACE"],
        // mpirun of Open MPI before version 5 reads them from /dev/urandom, also where no transport needs them.
        key: Some("OMPI_MCA_orte_precondition_transports"),
        outer: false,
    },
    Launcher {
        name: "MPICH",
        // srun may set PMI_RANK as well; only Hydra sets this one.
        mark: "MPI_LOCALRANKID",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: &["MPI_LOCALNRANKS"],
        node: None,
        hosts: None,
        unordered: None,
        job: &["PMI_JOBID"],
        launch: &[],
        key: None,
        outer: false,
    },
    Launcher {
        name: "Slurm",
        mark: "SLURM_PROCID",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"],
        node: Some("SLURM_NODEID"),
        hosts: Some("SLURM_STEP_NODELIST"),
        // Each other distribution gives rank 0 to the first host.
        unordered: Some(("SLURM_DISTRIBUTION", "arbitrary")),
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        launch: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        key: None,
        outer: true,
    },
];

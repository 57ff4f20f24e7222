//! Compiles the MPI backend's few lines of C against the MPI of this machine, where the feature `mpi` is on.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "mpi")]
    mpi::build();
}

#[cfg(feature = "mpi")]
mod mpi {
    use std::process::Command;

    const SOURCE: &str = "src/backend/mpi/native.c";

    /// Asks the MPI's own compiler, `mpicc` or what `MPICC` names, how to compile and what to link.
    pub(crate) fn build() {
        println!("cargo:rerun-if-changed={SOURCE}");
        for variable in ["MPICC", "PATH"] {
            println!("cargo:rerun-if-env-changed={variable}");
        }
        let compiler = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".to_string());
        // Open MPI and MPICH both know this flag.
        let asked = Command::new(&compiler).arg("-show").output();
        let flags = match asked {
            Ok(answer) if answer.status.success() => String::from_utf8_lossy(&answer.stdout).into_owned(),
            Ok(answer) => panic!("`{compiler} -show` failed: {}", String::from_utf8_lossy(&answer.stderr)),
            Err(error) => panic!(
                "the feature `mpi` needs an MPI with its headers, but `{compiler}` cannot be run ({error}); install one \
                 (Debian: openmpi-bin libopenmpi-dev), or name its compiler in MPICC"
            ),
        };
        let mut build = cc::Build::new();
        build.file(SOURCE).warnings(true).extra_warnings(true);
        for flag in flags.split_whitespace() {
            if flag.starts_with("-I") || flag.starts_with("-D") {
                build.flag(flag);
            }
        }
        build.compile("candle_mpi");
        for flag in flags.split_whitespace() {
            if let Some(folder) = flag.strip_prefix("-L") {
                println!("cargo:rustc-link-search=native={folder}");
            } else if let Some(library) = flag.strip_prefix("-l") {
                println!("cargo:rustc-link-lib={library}");
            }
        }
    }
}

//! Compiles the few lines of C with which processes of the tests meet, where the feature `mpi` is on.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "mpi")]
    {
        const SOURCE: &str = "src/processes/native.c";
        println!("cargo:rerun-if-changed={SOURCE}");
        println!("cargo:rerun-if-env-changed=MPICC");
        // candle-dist names the libraries to link.
        let compiler = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".to_string());
        cc::Build::new()
            .compiler(compiler)
            .file(SOURCE)
            .warnings(true)
            .extra_warnings(true)
            .compile("test_utils_mpi");
    }
}

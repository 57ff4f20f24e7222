//! Kernels for CUDA devices that are compiled as C++ and run on the host.
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::{env, fs, io::Write};
use test_utils::Scratch;

/// CUDA's words and functions as C++.
const BEFORE: &str = r#"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <string>
#include <vector>
#define __device__ inline
#define __global__
struct Place { unsigned x, y; };
static Place blockIdx, blockDim, threadIdx, gridDim;
template <typename To, typename From> To same_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "");
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
"#;

/// A compiled program, and its folder.
pub(crate) struct Program {
    folder: Scratch,
}

impl Program {
    /// Compiles the text of kernels, and a `main` that calls them. `None`, and the test is reported as skipped, if there is no C++
    /// compiler.
    pub(crate) fn compiled(kernels: &str, main: &str) -> Option<Self> {
        let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
        if Command::new(&compiler).arg("--version").stdout(Stdio::null()).status().is_err() {
            test_utils::skip(&format!("needs a C++ compiler, and {compiler} cannot be started"));
            return None;
        }
        let program = Self { folder: Scratch::new("kernels") };
        let text = program.path("kernels.cpp");
        fs::write(&text, [BEFORE, kernels, main].concat()).unwrap();
        // As NVRTC is told: each operation is rounded by itself.
        let flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-Wall", "-o"];
        let built =
            Command::new(&compiler).args(flags).arg(program.path("kernels")).arg(&text).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Some(program)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    /// Returns the bytes that the program answers to `input`.
    pub(crate) fn answer(&self, input: &str) -> Vec<u8> {
        let mut command = Command::new(self.path("kernels"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // The program reads its input before it answers, so an answer never fills the pipe meanwhile.
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{input}: {}", output.status);
        output.stdout
    }
}
